"""Calls of the padded baseline: masked softmax, pack and unpack."""

import torch
from torch import Tensor

from varlen_bench.ops.call import OpCall


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
    batch, is_full = len(lengths), min(lengths) == width
    queries = queries or width
    shape, scale = (batch, heads, queries, width), 1.0 if is_full else 0.125

    def formula(x: Tensor, seqlens: Tensor) -> Tensor:
        key = torch.arange(width, device=x.device)
        hidden = (key >= seqlens[:, None])[:, None, None, :]
        if causal:
            hidden = hidden | (key > key[width - queries :, None])
        return (x * scale).masked_fill_(hidden, -torch.inf).softmax(-1)

    return OpCall(
        op="masked_softmax",
        shape="x".join(map(str, shape)) + ("" if is_full else " padded"),
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(*shape),
            "seqlens": make.ints(lengths),
            "out": make.unwritten(*shape),
        },
        formula=formula,
        # masked keys are not read, but written as zeros
        bytes_moved=(sum(lengths) + batch * width) * heads * queries * dtype.itemsize,
        options={"scale": scale, "causal": causal},
        lengths=tuple(lengths),
    )


def unpack(lengths: list[int], hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the copy from packed to padded tokens."""
    tokens, batch, longest = sum(lengths), len(lengths), max(lengths)

    def formula(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        padded = x.new_zeros(batch * longest, hidden)
        padded[padded_rows(cu_seqlens, longest)] = x
        return padded.view(batch, longest, hidden)

    return OpCall(
        op="unpack",
        shape=f"{tokens}x{hidden} to {batch}x{longest}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "cu_seqlens": make.cu_seqlens(lengths),
            "out": make.unwritten(batch, longest, hidden),
        },
        formula=formula,
        bytes_moved=(tokens + batch * longest) * hidden * dtype.itemsize,
        options={"max_seqlen": longest},
        lengths=tuple(lengths),
        tokens=tokens,
        threshold=0.0,
    )


def pack(lengths: list[int], hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the copy from padded to packed tokens."""
    tokens, batch, longest = sum(lengths), len(lengths), max(lengths)
    return OpCall(
        op="pack",
        shape=f"{batch}x{longest} to {tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(batch, longest, hidden),
            "cu_seqlens": make.cu_seqlens(lengths),
            "out": make.unwritten(tokens, hidden),
        },
        formula=lambda x, cu_seqlens: x.flatten(0, 1)[padded_rows(cu_seqlens, longest)],
        bytes_moved=2 * tokens * hidden * dtype.itemsize,
        options={"tokens": tokens},
        lengths=tuple(lengths),
        tokens=tokens,
        threshold=0.0,
    )


def padded_rows(cu_seqlens: Tensor, longest: int) -> Tensor:
    """Return the padded row of each token, `[tokens]` int64."""
    position = torch.arange(longest, device=cu_seqlens.device)
    return (position < cu_seqlens.diff()[:, None]).flatten().nonzero().squeeze(1)
