"""The cases of each op, by the name that `--only` takes; the largest and most telling ones come first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from varlen.execution.buckets import Buckets
from varlen_bench.kernels import beams, rows, sequences
from varlen_bench.kernels.case import Case
from varlen_bench.kernels.grid import Grid, packed_lengths

_FEATURES = 4  # a feed-forward block is so many times wider than its encoder


def softmax(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return softmax over the paper's scores, and over those of a server's batch, padded."""
    cases = [
        rows.softmax_case([length] * batch, length, grid.heads, dtype)
        for batch, length in grid.paper()
    ]
    lengths = grid.serving_lengths()
    for heads in dict.fromkeys(heads for _, heads in grid.serving_widths):
        cases.insert(1, rows.softmax_case(lengths, max(lengths), heads, dtype))
    return cases


def layer_norm(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return residual and layer norm for a server's batch, and for the paper's."""
    served = [
        rows.add_layer_norm_case(grid.serving_tokens, width, dtype)
        for width, _ in grid.serving_widths
    ]
    return served + [
        rows.add_layer_norm_case(
            batch * length, grid.hidden, dtype, shape=f"{batch}x{length}x{grid.hidden}"
        )
        for batch, length in grid.paper()
    ]


def attention(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return attention for a server's batch, and for the paper's."""
    lengths = grid.serving_lengths()
    cases = [
        sequences.attention_case(
            lengths,
            heads,
            width // heads,
            dtype,
            shape=f"{grid.serving_tokens} packed {heads}x{width // heads}",
            compiled=width == grid.hidden,
        )
        for width, heads in grid.serving_widths
    ]
    for batch, length in grid.paper():
        head_dim = grid.hidden // grid.heads
        shape = f"{batch}x{length} {grid.heads}x{head_dim}"
        cases.append(
            sequences.attention_case([length] * batch, grid.heads, head_dim, dtype, shape=shape)
        )
    return cases


def served_attention(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return attention as a server calls it: with room for more sequences than there are, by their mean length."""
    cases = []
    for shortest, longest in ((grid.shortest, grid.longest), (3, 30), (3, 20)):
        lengths = packed_lengths(grid.serving_tokens, shortest, longest)
        room = Buckets(grid.serving_tokens).smallest(grid.serving_tokens, len(lengths)).sequences
        for width, heads in grid.serving_widths:
            shape = f"{grid.serving_tokens} of {shortest}-{longest} {heads}x{width // heads}"
            cases.append(
                sequences.attention_case(
                    lengths, heads, width // heads, dtype, shape=shape, room=room
                )
            )
    return cases


def activation(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return bias and GELU, and the gate of SwiGLU."""
    served = [
        make(grid.serving_tokens, _FEATURES * width, dtype)
        for width, _ in grid.serving_widths
        for make in (rows.activate_case, rows.silu_gate_case)
    ]
    features = _FEATURES * grid.hidden
    return served + [
        rows.activate_case(
            batch * length, features, dtype, shape=f"{batch}x{length}x{features}"
        ).without_compilation()
        for batch, length in grid.paper()
    ]


def rms_norm(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return residual and RMS norm for a server's batch."""
    return [
        rows.rms_norm_case(grid.serving_tokens, width, dtype) for width, _ in grid.serving_widths
    ]


def embedding(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return embeddings and their norm for a server's batch, and for the paper's."""
    tables = (grid.vocabulary, grid.positions)
    served = [
        rows.embed_case(grid.serving_tokens, width, *tables, dtype)
        for width, _ in grid.serving_widths
    ]
    return served + [
        rows.embed_case(
            batch * length,
            grid.hidden,
            *tables,
            dtype,
            shape=f"{batch}x{length}x{grid.hidden}",
        ).without_compilation()
        for batch, length in grid.paper()
    ]


def packing(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return pooling, and the way to padding and back, for a server's batch."""
    lengths = grid.serving_lengths()
    return [
        make(lengths, width, dtype)
        for width, _ in grid.serving_widths
        for make in (sequences.pool_case, sequences.unpack_case, sequences.pack_case)
    ]


def beam(grid: Grid, dtype: torch.dtype) -> list[Case]:
    """Return the beam step."""
    return [
        beams.beam_case(count, grid.beams, vocabulary, dtype)
        for vocabulary in grid.vocabularies
        for count in grid.sequences
    ]


GROUPS: dict[str, Callable[[Grid, torch.dtype], list[Case]]] = {
    "softmax": softmax,
    "layernorm": layer_norm,
    "attention": attention,
    "beam": beam,
    "activation": activation,
    "rmsnorm": rms_norm,
    "embedding": embedding,
    "packing": packing,
}
# Measured in a way of its own; see encoder.py.
ENCODER = "encoder"


def chosen_groups(only: str) -> list[str]:
    """Return the names in the comma-separated `only`, all if it is empty.

    Raises:
        ValueError: a name is none of them.
    """
    known = [*GROUPS, ENCODER]
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise ValueError(f"{name!r} is no group; there are {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]
