"""Marian for training, with the parameter names of its Hugging Face checkpoints.

An encoder and a decoder with the norms after each residual, sinusoidal positions and one embedding for all.
Source: Junczys-Dowmunt et al. 2018, "Marian: Fast Neural Machine Translation in C++", arXiv:1804.00344.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from varlen_tools.train_demo.transformer import Shape, attend

DEVIATION = 0.02  # of initial weights


class Attention(nn.Module):
    """Attention of queries over keys and values from one place."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden)
        self.out_proj = nn.Linear(shape.hidden, shape.hidden)

    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
    ) -> Tensor:
        """Return `[batch, tokens, hidden]`; `mask`, `[batch, 1, 1, context]`, is true for real tokens."""
        query, key, value = self.q_proj(x), self.k_proj(context), self.v_proj(context)
        mixed = attend(query, key, value, heads=self.heads, mask=mask, is_causal=is_causal)
        out: Tensor = self.out_proj(mixed)
        return out


class Layer(nn.Module):
    """Self-attention and feed-forward, each with its norm after the residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.self_attn_layer_norm = nn.LayerNorm(shape.hidden)
        self.fc1 = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.fc2 = nn.Linear(4 * shape.hidden, shape.hidden)
        self.final_layer_norm = nn.LayerNorm(shape.hidden)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`, normed."""
        out: Tensor = self.final_layer_norm(x + self.fc2(functional.silu(self.fc1(x))))
        return out


class EncoderLayer(Layer):
    """A layer of the encoder."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`."""
        return self.feed_forward(self.self_attn_layer_norm(x + self.self_attn(x, x, mask)))


class DecoderLayer(Layer):
    """A layer of the decoder: causal, with attention to the source before the feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.encoder_attn = Attention(shape)
        self.encoder_attn_layer_norm = nn.LayerNorm(shape.hidden)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden]`."""
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, is_causal=True))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, source, mask))
        return self.feed_forward(x)


class Stack(nn.Module):
    """The layers of an encoder or decoder."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Marian(nn.Module):
    """The model; it has the state of transformers' MarianModel, and the bias of its logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale = shape.hidden**0.5
        self.shared = nn.Embedding(shape.vocabulary, shape.hidden)
        self.encoder = Stack(EncoderLayer(shape) for _ in range(shape.layers))
        self.decoder = Stack(DecoderLayer(shape) for _ in range(shape.layers))
        self.final_logits_bias = nn.Parameter(torch.zeros(1, shape.vocabulary))
        self.register_buffer(
            "sinusoids", sinusoids(shape.positions, shape.hidden), persistent=False
        )
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and name != "final_logits_bias":
                nn.init.normal_(weight, std=DEVIATION)

    def encode(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the encoder's output `[batch, tokens, hidden]` of token ids `[batch, tokens]`."""
        x = self._embed(token_ids)
        for layer in self.encoder.layers:
            x = layer(x, mask)
        return x

    def decode(self, token_ids: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        """Return logits `[batch, tokens, vocabulary]` of the tokens after each of `token_ids`.

        Args:
            token_ids: `[batch, tokens]`, from the start token.
            source: `[batch, source tokens, hidden]`, the encoder's output.
            mask: `[batch, 1, 1, source tokens]`, true for tokens that are not padding.
        """
        x = self._embed(token_ids)
        for layer in self.decoder.layers:
            x = layer(x, source, mask)
        return functional.linear(x, self.shared.weight, self.final_logits_bias[0])

    def _embed(self, token_ids: Tensor) -> Tensor:
        positions = self.get_buffer("sinusoids")[: token_ids.shape[1]]
        embeddings: Tensor = self.shared(token_ids) * self.scale
        return embeddings + positions


def sinusoids(positions: int, hidden: int) -> Tensor:
    """Return position embeddings `[positions, hidden]`: all sines, then all cosines."""
    rates = 10000.0 ** (-torch.arange(0, hidden, 2, dtype=torch.float64) / hidden)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()
