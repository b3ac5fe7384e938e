"""GPT-2 for training, with the parameter names of its Hugging Face checkpoints.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from varlen_tools.train_demo.transformer import Shape, attend

DEVIATION = 0.04  # of initial weights
EPSILON = 1e-5


class Linear(nn.Module):
    """A linear layer whose weight is `[inputs, outputs]`, as GPT-2 stores it."""

    def __init__(self, inputs: int, outputs: int, deviation: float = DEVIATION) -> None:
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
        self.c_proj = Linear(shape.hidden, shape.hidden, DEVIATION / (2 * shape.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`."""
        mixed = attend(*self.c_attn(x).chunk(3, dim=-1), heads=self.heads, is_causal=True)
        out: Tensor = self.c_proj(mixed)
        return out


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = Linear(shape.hidden, 4 * shape.hidden)
        self.c_proj = Linear(4 * shape.hidden, shape.hidden, DEVIATION / (2 * shape.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`."""
        out: Tensor = self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Layer(nn.Module):
    """One transformer layer, with the norms before attention and feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.hidden, EPSILON)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.hidden, EPSILON)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2(nn.Module):
    """The model; it has the state of transformers' GPT2Model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.wpe = nn.Embedding(shape.positions, shape.hidden)
        self.h = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.hidden, EPSILON)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=DEVIATION)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return logits `[batch, tokens, vocabulary]` of token ids `[batch, tokens]`."""
        x = self.wte(token_ids) + self.wpe.weight[: token_ids.shape[1]]
        for layer in self.h:
            x = layer(x)
        return functional.linear(self.ln_f(x), self.wte.weight)
