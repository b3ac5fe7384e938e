"""GPT-2 for training, with the parameter names of its Hugging Face checkpoints.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_DEVIATION = 0.04  # of initial weights
_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a GPT-2 model."""

    vocabulary: int
    positions: int
    hidden: int
    layers: int
    heads: int

    def config(self, end_token: int) -> dict[str, object]:
        """Return config.json."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "dtype": "float32",
            "vocab_size": self.vocabulary,
            "n_positions": self.positions,
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": _EPSILON,
            "initializer_range": _DEVIATION,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
            "bos_token_id": end_token,
            "eos_token_id": end_token,
        }


class Linear(nn.Module):
    """A linear layer whose weight is `[inputs, outputs]`, as GPT-2 stores it."""

    def __init__(self, inputs: int, outputs: int, deviation: float = _DEVIATION) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * deviation)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, outputs]`."""
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = Linear(shape.hidden, 3 * shape.hidden)
        self.c_proj = Linear(shape.hidden, shape.hidden, _DEVIATION / (2 * shape.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`."""
        # [batch, tokens, 3 * hidden] -> 3 x [batch, heads, tokens, head_dim]
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = Linear(shape.hidden, 4 * shape.hidden)
        self.c_proj = Linear(4 * shape.hidden, shape.hidden, _DEVIATION / (2 * shape.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`."""
        out: Tensor = self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Layer(nn.Module):
    """One transformer layer, with the norms before attention and feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.hidden, _EPSILON)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.hidden, _EPSILON)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2(nn.Module):
    """The model; its state is that of transformers' GPT2Model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.wpe = nn.Embedding(shape.positions, shape.hidden)
        self.h = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.hidden, _EPSILON)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=_DEVIATION)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return logits `[batch, tokens, vocabulary]` of token ids `[batch, tokens]`."""
        x = self.wte(token_ids) + self.wpe.weight[: token_ids.shape[1]]
        for layer in self.h:
            x = layer(x)
        return functional.linear(self.ln_f(x), self.wte.weight)
