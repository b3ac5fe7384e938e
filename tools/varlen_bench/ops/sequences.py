"""Calls of the ops that read `cu_seqlens`: attention and pooling."""

from typing import Any

import torch
from torch import Tensor

from varlen_bench.ops.call import (
    Inputs,
    Made,
    OpCall,
    Tensors,
    as_tensor,
    bounds,
    flags,
    random_fp32,
    unwritten,
)
from varlen_kernels import Pooling, TermPooling
from varlen_kernels.reference.attention import Distances
from varlen_kernels.reference.vocabulary import SLICE_TERMS


def attention_varlen(
    lengths: list[int],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kv_heads: int | None = None,
    causal: bool = False,
    window: int = 0,
    biased: bool = False,
    by_distance: bool = False,
    has_tiles: bool = False,
    half_keys: bool = False,
    slots: int = 0,
) -> OpCall:
    """Return attention over packed tokens.

    Args:
        kv_heads: heads of the keys and values; `heads` if None.
        window: a token reads tokens whose distance is below this; 0 is all.
        biased: whether to add a bias by the distance of query and key.
        by_distance: whether distances have keys and queries.
        has_tiles: whether a table of tiles is given, as in a model; `OpCall.prepare` fills it.
        half_keys: whether only the first half of each sequence is read.
        slots: number of sequences in `cu_seqlens`, as in a server's batch; those past `lengths` are empty.
    """
    tokens, hidden, distances = sum(lengths), heads * head_dim, 2 * max(lengths) - 1
    width = hidden + 2 * (kv_heads or heads) * head_dim
    empty = max(slots - len(lengths), 0)
    inputs: dict[str, Made] = {"qkv": (tokens, width)}
    inputs["cu_seqlens"] = bounds(lengths + [0] * empty)
    inputs["bias"] = random_fp32(heads, distances) if biased else None
    if has_tiles:
        rows = tokens + len(lengths) + empty + 1
        inputs["tiles"] = unwritten(torch.int32, rows, 3 + half_keys)
    if by_distance:
        # each distance has its own row
        inputs["distances"] = lambda make: Distances(
            make.ints(list(range(distances))),
            make.random(distances, hidden),
            make.random(distances, hidden),
        )
    if half_keys:
        inputs["key_lengths"] = [-(-length // 2) for length in lengths] + [0] * empty
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "causal": causal}

    def fill_tiles(ops: Any, tensors: Inputs) -> None:
        read = "qkv cu_seqlens bias distances key_lengths".split()
        ops.attention_tiles(*map(tensors.get, read), **options, out=tensors["tiles"])

    return OpCall(
        "attention_varlen",
        f"{tokens} packed {heads if kv_heads is None else f'{heads}/{kv_heads}'}x{head_dim}",
        dtype,
        inputs,
        (tokens, hidden),
        {**options, "scale": head_dim**-0.5, "window": window},
        lengths=tuple(lengths),
        fill=fill_tiles if has_tiles else None,
        moved=(width + hidden) * tokens * dtype.itemsize,
        flops=4 * hidden * sum(length * length for length in lengths),
        tokens=tokens,
    )


def attention_tiles(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype) -> OpCall:
    """Return the tiles of queries of attention over packed tokens."""
    tokens, slots = sum(lengths), len(lengths)
    return OpCall(
        "attention_tiles",
        f"{tokens} packed {heads}x{head_dim}",
        dtype,
        {"qkv": (tokens, 3 * heads * head_dim), "cu_seqlens": bounds(lengths)},
        unwritten(torch.int32, tokens + slots + 1, 3),
        {"num_heads": heads},
        # the sequence of each first tile, which no launch changes
        read=lambda result, _: first_tiles(result)[:, :2],
        lengths=tuple(lengths),
        moved=4 * slots + 12 * (tokens // 64 + slots),
        threshold=0.0,
    )


def first_tiles(tiles: Any) -> Tensor:
    """Return the tiles that begin a sequence."""
    first: Tensor = tiles[(tiles[:, 2] == 0) & (tiles[:, 1] > 0)]
    return first


def pool(
    lengths: list[int],
    hidden: int,
    dtype: torch.dtype,
    *,
    mode: Pooling = "mean",
    normalized: bool = True,
    unpooled: int = 0,
) -> OpCall:
    """Return the pooling of each sequence to one vector.

    Args:
        unpooled: number of tokens at the start of each sequence that are not pooled.
    """
    tokens, batch = sum(lengths), len(lengths)
    inputs: dict[str, Made] = {"x": (tokens, hidden), "cu_seqlens": bounds(lengths)}
    inputs["normalize"] = flags(batch, value=True) if normalized else None
    inputs["unpooled_lengths"] = [unpooled] * batch if unpooled else None
    return OpCall(
        "pool",
        f"{tokens}x{hidden} {mode}",
        dtype,
        inputs,
        unwritten(torch.float32, batch, hidden),
        {"mode": mode},
        lengths=tuple(lengths),
        tokens=tokens,
        # terms of a long sum nearly cancel
        threshold=1e-4,
    )


def term_weights(
    lengths: list[int], hidden: int, terms: int, dtype: torch.dtype, *, mode: TermPooling = "max"
) -> OpCall:
    """Return the weights of a vocabulary's terms for each sequence."""
    tokens, batch = sum(lengths), len(lengths)

    def weight(make: Tensors) -> Tensor:
        # as large as in a model: logits near 1
        return make.random(hidden, terms).div_(hidden**0.5)

    def out(make: Tensors) -> tuple[Tensor, Tensor]:
        scratch = make.unwritten(tokens, min(terms, SLICE_TERMS))
        return make.unwritten(batch, terms, dtype=torch.float32), scratch

    return OpCall(
        "term_weights",
        f"{tokens}x{hidden}x{terms} {mode}",
        dtype,
        {"x": (tokens, hidden), "weight": weight, "bias": (terms,), "cu_seqlens": bounds(lengths)},
        out,
        {"mode": mode},
        read=lambda result, inputs: as_tensor(result[0], inputs),
        lengths=tuple(lengths),
        moved=(tokens + terms) * hidden * dtype.itemsize + 4 * batch * terms,
        flops=2 * tokens * hidden * terms,
        tokens=tokens,
    )


def first_tokens(lengths: list[int], hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the copy of each sequence's first token."""
    tokens, batch = sum(lengths), len(lengths)
    return OpCall(
        "first_tokens",
        f"{batch} of {tokens}x{hidden}",
        dtype,
        {"x": (tokens, hidden), "cu_seqlens": bounds(lengths)},
        (batch, hidden),
        lengths=tuple(lengths),
        moved=2 * batch * hidden * dtype.itemsize,
        threshold=0.0,
    )
