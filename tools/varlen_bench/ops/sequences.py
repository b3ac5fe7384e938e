"""Calls of the ops that read `cu_seqlens`: attention and pooling."""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors, as_tensor
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
        window: number of last tokens that a token reads if `causal`; 0 is all.
        biased: whether to add a bias by the distance of query and key.
        by_distance: whether distances have keys and queries.
        has_tiles: whether a table of tiles is given, as in a model; `OpCall.prepare` fills it.
        half_keys: whether the first half of each sequence is read alone.
        slots: number of sequences in `cu_seqlens`, as in a server's batch; those past `lengths` are empty.
    """
    tokens, hidden, span = sum(lengths), heads * head_dim, max(lengths)
    key_heads = kv_heads or heads
    width = hidden + 2 * key_heads * head_dim
    rows_of_tiles = tokens + max(len(lengths), slots) + 1, 3 + half_keys

    def attended(
        qkv: Tensor,
        bias: Tensor | None,
        distances: Distances | None,
    ) -> Tensor:
        length = len(qkv)
        parts = torch.split(qkv.view(length, -1, head_dim), [heads, key_heads, key_heads], dim=1)
        q, k, v = (
            part.transpose(0, 1).repeat_interleave(heads // part.shape[1], dim=0) for part in parts
        )
        scores = q @ k.transpose(1, 2) * head_dim**-0.5
        position = torch.arange(length, device=qkv.device)
        distance = position - position[:, None]
        if distances is not None:
            # [queries, keys, heads, head_dim]; each distance has its own row
            keys, queries = (
                table[distance + span - 1].to(qkv.dtype).view(length, length, heads, head_dim)
                for table in (distances.keys, distances.queries)
                if table is not None
            )
            products = torch.einsum("hqd,qkhd->hqk", q, keys)
            products += torch.einsum("hkd,qkhd->hqk", k, queries)
            scores += products * head_dim**-0.5
        if bias is not None:
            scores += bias[:, distance + span - 1]
        if causal:
            hidden_keys = (distance > 0) | (distance <= -(window or length))
            scores.masked_fill_(hidden_keys, -torch.inf)
        if half_keys:
            scores[:, :, -(-length // 2) :] = -torch.inf
        context: Tensor = scores.softmax(-1) @ v
        return context.transpose(0, 1).flatten(1)

    def formula(
        qkv: Tensor,
        cu_seqlens: Tensor,  # noqa: ARG001
        bias: Tensor | None,
        tiles: Tensor | None = None,  # noqa: ARG001
        distances: Distances | None = None,
        key_lengths: Tensor | None = None,  # noqa: ARG001
    ) -> Tensor:
        return torch.cat([attended(rows, bias, distances) for rows in torch.split(qkv, lengths)])

    def distance_tables(make: Tensors) -> Inputs:
        rows = torch.arange(2 * span - 1, dtype=torch.int32, device=make.device)
        keys, queries = (make.random(len(rows), hidden) for _ in range(2))
        return {"distances": Distances(rows, keys, queries)}

    def halves(make: Tensors) -> Inputs:
        counts = [-(-length // 2) for length in lengths] + [0] * (slots - len(lengths))
        return {"key_lengths": torch.tensor(counts, dtype=torch.int32, device=make.device)}

    def fill_tiles(ops: Any, inputs: Inputs) -> None:
        ops.attention_tiles(
            *(inputs[name] for name in ("qkv", "cu_seqlens", "bias")),
            inputs.get("distances"),
            inputs.get("key_lengths"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            causal=causal,
            out=inputs["tiles"],
        )

    return OpCall(
        op="attention_varlen",
        shape=f"{tokens} packed {heads if kv_heads is None else f'{heads}/{kv_heads}'}x{head_dim}",
        dtype=dtype,
        inputs=lambda make: {
            "qkv": make.random(tokens, width),
            "cu_seqlens": make.cu_seqlens(lengths, slots),
            "bias": (make.random(heads, 2 * span - 1, dtype=torch.float32) if biased else None),
            **({"tiles": make.unwritten(*rows_of_tiles, dtype=torch.int32)} if has_tiles else {}),
            **(distance_tables(make) if by_distance else {}),
            **(halves(make) if half_keys else {}),
            "out": make.unwritten(tokens, hidden),
        },
        formula=formula,
        bytes_moved=(width + hidden) * tokens * dtype.itemsize,
        options={
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "scale": head_dim**-0.5,
            "causal": causal,
            "window": window,
        },
        lengths=tuple(lengths),
        fill=fill_tiles if has_tiles else None,
        flops=4 * hidden * sum(length * length for length in lengths),
        tokens=tokens,
    )


def attention_tiles(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype) -> OpCall:
    """Return the tiles of queries of attention over packed tokens."""
    tokens, slots = sum(lengths), len(lengths)

    def begins_and_lengths(result: object, inputs: Inputs) -> Tensor:  # noqa: ARG001  # a `Read`
        """Return the sequence of each first tile, which no launch changes."""
        assert isinstance(result, Tensor)
        is_first = (result[:, 2] == 0) & (result[:, 1] > 0)
        return result[is_first, :2]

    return OpCall(
        op="attention_tiles",
        shape=f"{tokens} packed {heads}x{head_dim}",
        dtype=dtype,
        inputs=lambda make: {
            "qkv": make.random(tokens, 3 * heads * head_dim),
            "cu_seqlens": make.cu_seqlens(lengths),
            "out": make.unwritten(tokens + slots + 1, 3, dtype=torch.int32),
        },
        formula=lambda qkv, cu_seqlens: torch.stack(  # noqa: ARG005
            (cu_seqlens[:-1], cu_seqlens.diff()), dim=1
        ),
        bytes_moved=4 * slots + 12 * (tokens // 64 + slots),
        options={"num_heads": heads},
        read=begins_and_lengths,
        lengths=tuple(lengths),
        threshold=0.0,
    )


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

    def pooled(rows: Tensor) -> Tensor:
        if mode in ("cls", "last"):
            return rows[0 if mode == "cls" else -1]
        if mode == "max":
            return rows.amax(0)
        if mode == "weighted_mean":
            places = torch.arange(len(rows), dtype=rows.dtype, device=rows.device) + (unpooled + 1)
            return torch.mv(rows.t(), places / places.sum())
        divisors = {"sum": 1.0, "mean": len(rows), "mean_sqrt": math.sqrt(len(rows))}
        return rows.sum(0).div(divisors[mode])

    def formula(
        x: Tensor,
        cu_seqlens: Tensor,  # noqa: ARG001
        normalize: Tensor | None,
        unpooled_lengths: Tensor | None = None,  # noqa: ARG001
    ) -> Tensor:
        vectors = torch.stack([pooled(rows[unpooled:]) for rows in torch.split(x, lengths)])
        return vectors if normalize is None else F.normalize(vectors, dim=1)

    return OpCall(
        op="pool",
        shape=f"{tokens}x{hidden} {mode}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "cu_seqlens": make.cu_seqlens(lengths),
            "normalize": make.ints([1] * batch).bool() if normalized else None,
            **({"unpooled_lengths": make.ints([unpooled] * batch)} if unpooled else {}),
            "out": make.unwritten(batch, hidden, dtype=torch.float32),
        },
        formula=formula,
        bytes_moved=(tokens - unpooled * batch) * hidden * dtype.itemsize + 4 * batch * hidden,
        options={"mode": mode},
        lengths=tuple(lengths),
        tokens=tokens,
        # terms of a long sum nearly cancel
        threshold=1e-4,
    )


def term_weights(
    lengths: list[int],
    hidden: int,
    terms: int,
    dtype: torch.dtype,
    *,
    mode: TermPooling = "max",
) -> OpCall:
    """Return the weights of a vocabulary's terms for each sequence."""
    tokens, batch = sum(lengths), len(lengths)

    def formula(x: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor) -> Tensor:  # noqa: ARG001
        weights = torch.log1p(F.relu(x @ weight + bias))
        rows = torch.split(weights, lengths)
        return torch.stack([each.amax(0) if mode == "max" else each.sum(0) for each in rows])

    return OpCall(
        op="term_weights",
        shape=f"{tokens}x{hidden}x{terms} {mode}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            # as large as those of a model: logits near 1
            "weight": make.random(hidden, terms).div_(math.sqrt(hidden)),
            "bias": make.random(terms),
            "cu_seqlens": make.cu_seqlens(lengths),
            "out": (
                make.unwritten(batch, terms, dtype=torch.float32),
                make.unwritten(tokens, min(terms, SLICE_TERMS)),
            ),
        },
        formula=formula,
        read=_first,
        bytes_moved=(tokens + terms) * hidden * dtype.itemsize + 4 * batch * terms,
        options={"mode": mode},
        lengths=tuple(lengths),
        flops=2 * tokens * hidden * terms,
        tokens=tokens,
    )


def _first(result: object, inputs: Inputs) -> Tensor:
    assert isinstance(result, tuple)
    return as_tensor(result[0], inputs)


def first_tokens(lengths: list[int], hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the copy of each sequence's first token."""
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
        formula=lambda x, cu_seqlens: x[cu_seqlens[:-1]],
        bytes_moved=2 * batch * hidden * dtype.itemsize,
        lengths=tuple(lengths),
        threshold=0.0,
    )
