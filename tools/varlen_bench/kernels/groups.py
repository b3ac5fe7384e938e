"""The calls of each op by the name that `--only` takes; the largest and most telling ones come first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from varlen.execution.buckets import Buckets
from varlen_bench.kernels.grid import Grid, packed_lengths
from varlen_bench.ops import beam, padded, rows, sequences
from varlen_bench.ops.call import OpCall

# Width of a feed-forward block over that of its encoder.
_FEATURES = 4


def softmax(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return softmax over the paper's scores, and over those of a server's batch, padded."""
    calls = [
        padded.masked_softmax([length] * batch, length, grid.heads, dtype)
        for batch, length in grid.paper()
    ]
    lengths = grid.serving_lengths()
    for heads in dict.fromkeys(heads for _, heads in grid.serving_widths):
        calls.insert(1, padded.masked_softmax(lengths, max(lengths), heads, dtype))
    return calls


def layer_norm(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return residual and layer norm for a server's batch, and for the paper's."""
    served = [rows.add_layer_norm(grid.serving_tokens, w, dtype) for w, _ in grid.serving_widths]
    return served + [
        rows.add_layer_norm(
            batch * length, grid.hidden, dtype, shape=f"{batch}x{length}x{grid.hidden}"
        )
        for batch, length in grid.paper()
    ]


def attention(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return attention for a server's batch, and for the paper's."""
    head_dim = grid.hidden // grid.heads
    served = [
        sequences.attention_varlen(grid.serving_lengths(), heads, width // heads, dtype)
        for width, heads in grid.serving_widths
    ]
    return served + [
        sequences.attention_varlen(
            [length] * batch,
            grid.heads,
            head_dim,
            dtype,
            shape=f"{batch}x{length} {grid.heads}x{head_dim}",
        )
        for batch, length in grid.paper()
    ]


def served_attention(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return attention as a server calls it: with room for more sequences than there are, by their mean length."""
    calls = []
    for shortest, longest in ((grid.shortest, grid.longest), (3, 30), (3, 20)):
        lengths = packed_lengths(grid.serving_tokens, shortest, longest)
        room = Buckets(grid.serving_tokens).smallest(grid.serving_tokens, len(lengths)).sequences
        for width, heads in grid.serving_widths:
            head_dim = width // heads
            shape = f"{grid.serving_tokens} of {shortest}-{longest} {heads}x{head_dim}"
            calls.append(
                sequences.attention_varlen(lengths, heads, head_dim, dtype, shape=shape, room=room)
            )
    return calls


def activation(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return bias and GELU, and the gate of SwiGLU."""
    features = _FEATURES * grid.hidden
    served = [
        make(grid.serving_tokens, _FEATURES * width, dtype)
        for width, _ in grid.serving_widths
        for make in (rows.activate, rows.silu_gate)
    ]
    return served + [
        rows.activate(batch * length, features, dtype, shape=f"{batch}x{length}x{features}")
        for batch, length in grid.paper()
    ]


def rms_norm(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return residual and RMS norm for a server's batch."""
    return [rows.rms_norm(grid.serving_tokens, width, dtype) for width, _ in grid.serving_widths]


def embedding(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return embeddings and their norm for a server's batch, and for the paper's."""
    shapes = [(grid.serving_tokens, width, "") for width, _ in grid.serving_widths]
    shapes += [
        (batch * length, grid.hidden, f"{batch}x{length}x{grid.hidden}")
        for batch, length in grid.paper()
    ]
    tables = {"vocabulary": grid.vocabulary, "positions": grid.positions}
    return [
        rows.embed_layer_norm(tokens, width, dtype, **tables, shape=shape)
        for tokens, width, shape in shapes
    ]


def packing(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return pooling, and the copies to padded tokens and back, for a server's batch."""
    lengths = grid.serving_lengths()
    makers = (sequences.pool, padded.unpack, padded.pack)
    return [make(lengths, width, dtype) for width, _ in grid.serving_widths for make in makers]


def beams(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return the beam step."""
    return [
        beam.beam_step(count, grid.beams, vocabulary, dtype)
        for vocabulary in grid.vocabularies
        for count in grid.sequences
    ]


GROUPS: dict[str, Callable[[Grid, torch.dtype], list[OpCall]]] = {
    "softmax": softmax,
    "layernorm": layer_norm,
    "attention": attention,
    "beam": beams,
    "activation": activation,
    "rmsnorm": rms_norm,
    "embedding": embedding,
    "packing": packing,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def is_compiled(call: OpCall, grid: Grid) -> bool:
    """Return whether torch.compile is a peer: it takes seconds a shape, so some ops have it at few shapes."""
    if call.op == "attention_varlen":
        head_dim = grid.hidden // grid.heads
        return call.shape == f"{grid.serving_tokens} packed {grid.heads}x{head_dim}"
    if call.op in {"activate", "embed_layer_norm"}:
        return call.tokens == grid.serving_tokens
    return True
