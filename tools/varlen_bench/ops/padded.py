"""Calls of the padded baseline: masked softmax, pack and unpack."""

import torch

from varlen_bench.ops.call import OpCall, bounds


def masked_softmax(
    lengths: list[int],
    width: int,
    heads: int,
    dtype: torch.dtype,
    *,
    queries: int | None = None,
    causal: bool = False,
) -> OpCall:
    """Return masked softmax over padded scores, `[batch, heads, queries, width]`.

    The scale is 1 if every sequence has `width` tokens, so that a plain softmax can be a peer.

    Args:
        queries: `width` if None.
    """
    is_full = min(lengths) == width
    shape = (len(lengths), heads, queries or width, width)
    rows = heads * (queries or width)
    return OpCall(
        "masked_softmax",
        "x".join(map(str, shape)) + ("" if is_full else " padded"),
        dtype,
        {"x": shape, "seqlens": lengths},
        shape,
        {"scale": 1.0 if is_full else 0.125, "causal": causal},
        lengths=tuple(lengths),
        # masked keys are not read, but written as zeros
        moved=(sum(lengths) + len(lengths) * width) * rows * dtype.itemsize,
    )


def unpack(lengths: list[int], hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the copy from packed to padded tokens."""
    tokens, batch, longest = sum(lengths), len(lengths), max(lengths)
    return OpCall(
        "unpack",
        f"{tokens}x{hidden} to {batch}x{longest}",
        dtype,
        {"x": (tokens, hidden), "cu_seqlens": bounds(lengths)},
        (batch, longest, hidden),
        {"max_seqlen": longest},
        lengths=tuple(lengths),
        tokens=tokens,
        threshold=0.0,
    )


def pack(lengths: list[int], hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the copy from padded to packed tokens."""
    tokens, batch, longest = sum(lengths), len(lengths), max(lengths)
    return OpCall(
        "pack",
        f"{batch}x{longest} to {tokens}x{hidden}",
        dtype,
        {"x": (batch, longest, hidden), "cu_seqlens": bounds(lengths)},
        (tokens, hidden),
        {"tokens": tokens},
        lengths=tuple(lengths),
        # padding is not read
        moved=2 * tokens * hidden * dtype.itemsize,
        tokens=tokens,
        threshold=0.0,
    )
