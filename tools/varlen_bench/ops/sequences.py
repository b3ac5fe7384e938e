"""Calls of the ops that know where a sequence begins: attention and pooling."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors
from varlen_kernels import Pooling


def attention_varlen(
    lengths: list[int],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shape: str = "",
    causal: bool = False,
    biased: bool = False,
    room: int = 0,
) -> OpCall:
    """Return attention over packed tokens.

    Args:
        biased: whether there is a bias by the distance of query and key.
        room: number of sequences in `cu_seqlens`, as in a server's batch; those past the last are empty.
    """
    tokens, hidden = sum(lengths), heads * head_dim

    def inputs(make: Tensors) -> Inputs:
        span = max(lengths)
        bias = make.random(heads, 2 * span - 1, dtype=torch.float32) if biased else None
        return {
            "qkv": make.random(tokens, 3 * hidden),
            "cu_seqlens": make.cu_seqlens(lengths, room),
            "distance_bias": bias,
            "out": make.unwritten(tokens, hidden),
        }

    def exact(inputs: Inputs) -> Tensor:
        q, k, v = inputs["qkv"].double().view(tokens, 3, heads, head_dim).permute(1, 2, 0, 3)
        return torch.cat(
            [
                _softmax_product(
                    q[:, begin:end] * head_dim**-0.5,
                    k[:, begin:end],
                    v[:, begin:end],
                    inputs["distance_bias"],
                    causal=causal,
                )
                for begin, end in pairwise(inputs["cu_seqlens"].tolist())
            ]
        )

    return OpCall(
        op="attention_varlen",
        shape=shape or f"{tokens} packed {heads}x{head_dim}",
        dtype=dtype,
        inputs=inputs,
        exact=exact,
        bytes_moved=4 * tokens * hidden * dtype.itemsize,
        options={"num_heads": heads, "scale": head_dim**-0.5, "causal": causal},
        lengths=tuple(lengths),
        flops=4 * hidden * sum(length * length for length in lengths),
        tokens=tokens,
    )


def _softmax_product(
    q: Tensor, k: Tensor, v: Tensor, distance_bias: Tensor | None, *, causal: bool
) -> Tensor:
    """Return the attention of one sequence, [length, hidden]; q, k and v are [heads, length, head_dim]."""
    scores = q @ k.transpose(1, 2)
    place = torch.arange(q.shape[1], device=q.device)
    distance = place - place[:, None]
    if distance_bias is not None:
        scores += distance_bias[:, distance + distance_bias.shape[1] // 2]
    if causal:
        scores.masked_fill_(distance > 0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def pool(
    lengths: list[int],
    hidden: int,
    dtype: torch.dtype,
    *,
    mode: Pooling = "mean",
    normalized: bool = True,
) -> OpCall:
    """Return one vector for each sequence."""
    tokens, batch = sum(lengths), len(lengths)

    def inputs(make: Tensors) -> Inputs:
        chosen = torch.ones(batch, dtype=torch.bool, device=make.device)
        return {
            "x": make.random(tokens, hidden),
            "cu_seqlens": make.cu_seqlens(lengths),
            "normalize": chosen if normalized else None,
            "out": make.unwritten(batch, hidden, dtype=torch.float32),
        }

    def exact(inputs: Inputs) -> Tensor:
        vectors = torch.stack([_pooled(rows, mode) for rows in inputs["x"].double().split(lengths)])
        return F.normalize(vectors, dim=1) if normalized else vectors

    return OpCall(
        op="pool",
        shape=f"{tokens}x{hidden} {mode}",
        dtype=dtype,
        inputs=inputs,
        exact=exact,
        bytes_moved=tokens * hidden * dtype.itemsize + 4 * batch * hidden,
        options={"mode": mode},
        lengths=tuple(lengths),
        tokens=tokens,
        # sums of many terms that nearly cancel
        threshold=1e-4,
    )


def _pooled(rows: Tensor, mode: Pooling) -> Tensor:
    """Return the vector of one sequence, [hidden]."""
    if mode == "mean":
        return rows.mean(0)
    return rows.amax(0) if mode == "max" else rows[0 if mode == "cls" else -1]


def first_tokens(lengths: list[int], hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the first token of each sequence."""
    tokens, batch = sum(lengths), len(lengths)
    return OpCall(
        op="first_tokens",
        shape=f"{batch} of {tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "cu_seqlens": make.cu_seqlens(lengths),
            "out": make.unwritten(batch, hidden),
        },
        exact=lambda inputs: inputs["x"].double()[inputs["cu_seqlens"][:-1]],
        bytes_moved=2 * batch * hidden * dtype.itemsize,
        lengths=tuple(lengths),
        threshold=0.0,
    )
