"""Attention inside packed or padded sequences in plain torch, and its tiles of queries."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels.reference.torch_parts import (
    ROWS_PER_STEP,
    at_least_fp32,
    attend,
    bias_by_distance,
    copy_unless_same,
    slices_of,
    split_heads,
)

__all__ = ["attention_padded", "attention_tiles", "attention_varlen", "masked_softmax"]


class Distances(NamedTuple):
    """Keys and queries of distances for `attention_varlen`.

    The product of a query and a key then also has the product of the query with a key of their distance, and the
    product of the key with a query of their distance.
    Source: He et al. 2020, arXiv:2006.03654, section 3.1.

    Attributes:
        rows: `[2 · reach + 1]` int32, the row of each distance in the tables: entry reach + d for a key d tokens after
            its query, where d is clamped to -reach and reach.
        keys, queries: `[rows, num_heads · head_dim]` in the dtype of the tokens; one of them at least.
    """

    rows: Tensor
    keys: Tensor | None
    queries: Tensor | None


def attention_tiles(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    distances: Distances | None = None,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    causal: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the tiles of queries of `attention_varlen` with these arguments.

    A row has the first token of a sequence, its length, the first query of one tile, and with `key_lengths` the number
    of keys of the sequence. The tiles of a sequence cover its queries. How many queries a tile has is the choice of the
    device: here a tile is a whole sequence. Tiles without queries begin at or after the end of their sequence. Rows
    past the last tile mean nothing.

    Returns:
        `[len(qkv) + len(cu_seqlens), 3]` int32, or 4 with `key_lengths`, more rows than any device needs.

    Args:
        qkv: only its shape and dtype matter.
        cu_seqlens, bias, distances, key_lengths, num_heads, num_kv_heads, causal: see `attention_varlen`.
    """
    del bias, distances, num_heads, num_kv_heads, causal
    batch = len(cu_seqlens) - 1
    if out is None:
        columns = 3 if key_lengths is None else 4
        out = cu_seqlens.new_empty(len(qkv) + len(cu_seqlens), columns)
    out[:batch, 0] = cu_seqlens[:-1]
    out[:batch, 1] = cu_seqlens.diff()
    out[:batch, 2] = 0
    if key_lengths is not None:
        out[:batch, 3] = key_lengths
    return out


def attention_varlen(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,  # noqa: ARG001  # read by GPUs
    distances: Distances | None = None,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale + bias) v inside each sequence, `[tokens, num_heads · head_dim]`.

    Adjacent sequences of equal length share one call of torch, so a batch sorted by length needs few calls.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: the queries of each token, then its keys, then
            its values.
        cu_seqlens: `[batch + 1]` int32, ascending from 0 to tokens.
        bias: `[num_heads, 2 · reach + 1]`, added to the scaled scores: entry reach + d for a key d tokens after its
            query, where d is clamped to -reach and reach. This covers the relative positions of T5, and ALiBi.
        tiles: result of `attention_tiles` with the same arguments, to search `cu_seqlens` once for all layers.
        distances: keys and queries of distances; `num_kv_heads` is then `num_heads`.
        key_lengths: `[batch]` int32, the number of keys of each sequence that may be read, from its start: 1 to its
            length. None: all keys. A query whose window holds none of them gets zeros.
        num_kv_heads: a divisor of `num_heads`; neighbouring heads share a key head. None: as many as `num_heads`.
        scale: multiplies the scores, usually head_dim ** -0.5.
        causal: a token reads only itself and earlier tokens.
        window: a token reads those whose distance is below this; 0 is all.
        soft_cap: limit of scaled scores s, before a bias is added: soft_cap · tanh(s / soft_cap); 0 is none. Not with
            `distances`.

    Raises:
        ValueError: there are `distances` and a `soft_cap`.

    Source: the products with distances, see `Distances`; the limit: Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    if soft_cap and distances is not None:
        raise ValueError(f"soft_cap is {soft_cap}; allowed with distances: 0")
    tokens, width = qkv.shape
    kv_heads = num_kv_heads or num_heads
    head_dim = width // (num_heads + 2 * kv_heads)
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    if key_lengths is not None:
        # [tokens]
        key_lengths = key_lengths.repeat_interleave(cu_seqlens.diff())
    for start, count, length in _calls_of_equal_length(cu_seqlens):
        rows = slice(start, start + count * length)
        # [count, heads, length, head_dim] each, views
        q, k, v = (
            heads.view(count, length, -1, head_dim).transpose(1, 2)
            for heads in split_heads(qkv[rows], num_heads, kv_heads)
        )
        position = torch.arange(length, device=qkv.device)
        mask = None if bias is None else bias_by_distance(bias, position, position)
        if mask is not None and q.dtype == torch.float64:
            # torch reads it as such whatever it is
            mask = mask.double()
        if distances is not None:
            products = _distance_products(q, k, distances)
            mask = products * scale if mask is None else products * scale + mask
        hidden_keys = None
        if causal or 0 < window < length:
            hidden_keys = _hidden_keys(length, window, qkv.device, causal=causal)
        if key_lengths is not None:
            # [count, 1, length, length]
            past_end = position >= key_lengths[rows].view(count, 1, length, 1)
            hidden_keys = past_end if hidden_keys is None else past_end | hidden_keys
        if mask is not None and hidden_keys is not None:
            mask = mask.masked_fill(hidden_keys, -torch.inf)
        elif hidden_keys is not None and (
            soft_cap or key_lengths is not None or 0 < window < length
        ):
            mask = ~hidden_keys
        is_causal = causal and mask is None
        context = attend(q, k, v, mask, scale=scale, soft_cap=soft_cap, is_causal=is_causal)
        if key_lengths is not None and hidden_keys is not None:
            context = context.masked_fill(hidden_keys.all(dim=3, keepdim=True), 0.0)
        out[rows].view(count, length, num_heads, head_dim).copy_(context.transpose(1, 2))
    return out


def masked_softmax(
    x: Tensor, seqlens: Tensor, *, scale: float, causal: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return softmax(x · scale) over the keys that each query may read, 0 elsewhere.

    A query without a readable key gets a row of zeros.

    Args:
        x: `[batch, num_heads, queries, keys]`.
        seqlens: `[batch]` int32, the number of keys of each sequence; later keys are padding.
        causal: whether query i reads only keys 0 to i + keys - queries.
    """
    queries, keys = x.shape[-2:]
    key = torch.arange(keys, device=x.device)
    hidden = (key >= seqlens[:, None])[:, None, None, :]
    if causal:
        last = torch.arange(queries, device=x.device)[:, None] + (keys - queries)
        hidden = hidden | (key > last)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part in slices_of(x):
        scores = (at_least_fp32(x[part]) * scale).masked_fill_(hidden[part], -torch.inf)
        # a row that is -inf throughout gives NaN, and becomes zeros
        out[part] = scores.softmax(dim=-1).masked_fill_(hidden[part], 0.0)
    return out


def attention_padded(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    distances: Distances | None = None,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(q kᵀ · scale + bias) v inside padded sequences, `[tokens, num_heads · head_dim]`.

    Every second sequence is the padding of the one before it, perhaps of no tokens, and each pair has as many tokens as
    the longest: so the first rows of `qkv` are a padded tensor, `[pairs, longest, width]`. All scores are computed, in
    the dtype of the tokens; a masked softmax takes out what no query reads.

    Args:
        qkv, bias, distances, num_heads, num_kv_heads, scale, causal, window, soft_cap: see `attention_varlen`.
        cu_seqlens: `[2 · pairs + 1]` int32.
        key_lengths: see `attention_varlen`; numbers of padding are not read.
        out: the result, whose rows after the last pair are not written; `[pairs · longest², num_heads]` for the scores,
            and a tensor of the shape of `qkv`, which are both overwritten. Without it the host waits for `cu_seqlens`.

    Returns:
        `out`, whose second and third tensors mean nothing.

    Raises:
        ValueError: there are `distances` and a `soft_cap`.

    Source: Fang et al. 2021, arXiv:2010.05680, section 4.1: two batched products and a softmax between them.
    """
    return attend_padded(
        masked_softmax,
        (qkv, cu_seqlens, bias, distances, key_lengths),
        num_heads=num_heads,
        kv_heads=num_kv_heads or num_heads,
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        out=out,
    )


def attend_padded(
    softmax: Callable[..., Tensor],
    operands: tuple[Tensor, Tensor, Tensor | None, Distances | None, Tensor | None],
    *,
    num_heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    out: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `attention_padded` by way of a `masked_softmax` of any device."""
    qkv, cu_seqlens, bias, distances, key_lengths = operands
    if soft_cap and distances is not None:
        raise ValueError(f"soft_cap is {soft_cap}; allowed with distances: 0")
    pairs, group = len(cu_seqlens) // 2, num_heads // kv_heads
    head_dim = qkv.shape[1] // (num_heads + 2 * kv_heads)
    if out is None:
        of_scores = pairs * int(cu_seqlens[2]) ** 2 if pairs else 0
        out = (
            qkv.new_empty(len(qkv), num_heads * head_dim),
            qkv.new_empty(of_scores, num_heads),
            torch.empty_like(qkv, memory_format=torch.contiguous_format),
        )
    context, scores, by_head = out
    if not pairs or not len(scores):
        return out
    longest = isqrt(len(scores) // pairs)
    tokens = pairs * longest
    padded = [
        each.view(pairs, longest, kv_heads, -1, head_dim)
        for each in split_heads(qkv[:tokens], num_heads, kv_heads)
    ]
    # a query or a key after the other, head by head: [pairs, kv_heads, group, longest, head_dim]
    sizes = [tokens * heads * head_dim for heads in (num_heads, kv_heads, kv_heads)]
    parts = torch.split(by_head.view(-1)[: sum(sizes)], sizes)
    q, k, v = (
        part.view(pairs, kv_heads, -1, longest, head_dim).copy_(each.permute(0, 2, 3, 1, 4))
        for part, each in zip(parts, padded, strict=True)
    )
    queries, keys, values = (each.view(pairs * kv_heads, -1, head_dim) for each in (q, k, v))
    products = scores.view(pairs * kv_heads, group * longest, longest)
    torch.bmm(queries, keys.transpose(1, 2), out=products)

    weights = scores.view(pairs, num_heads, longest, longest)
    hidden = _hidden_keys(longest, window, qkv.device, causal=causal) if window else None
    if hidden is not None or bias is not None or distances is not None or soft_cap:
        position = torch.arange(longest, device=qkv.device)
        biases = None if bias is None else bias_by_distance(bias, position, position)
        for some in slices_of(weights):
            scaled = at_least_fp32(weights[some])
            if distances is not None:
                # each head has keys of its own
                scaled += _distance_products(q[some, :, 0], k[some, :, 0], distances)
            scaled *= scale
            _change_scores(scaled, soft_cap, biases, hidden, torch.finfo(qkv.dtype).min / 2)
            copy_unless_same(scaled, weights[some])
        scale = 1.0
    lengths = cu_seqlens[1::2] - cu_seqlens[:-1:2]
    if key_lengths is not None:
        lengths = key_lengths[::2].contiguous()
    softmax(weights, lengths, scale=scale, causal=causal, out=weights)
    if hidden is not None:
        weights.masked_fill_(hidden, 0.0)

    # queries are read no more
    torch.bmm(products, values, out=queries)
    into = context[:tokens].view(pairs, longest, kv_heads, group, head_dim)
    into.copy_(q.permute(0, 3, 1, 2, 4))
    return out


def _change_scores(
    scores: Tensor, soft_cap: float, bias: Tensor | None, hidden: Tensor | None, lowest: float
) -> None:
    """Limit scores, add a bias to them and lower hidden ones, in place.

    They are not -inf: a query may read no key, and NaN of padding would spread.
    """
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if bias is not None:
        scores += bias
    if hidden is not None:
        scores.masked_fill_(hidden, lowest)


def _calls_of_equal_length(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, sequences, length) of each call: parts of the runs of equal length.

    A call has at most ROWS_PER_STEP tokens, or one sequence.
    """
    for start, count, length in _runs_of_equal_length(cu_seqlens):
        step = max(1, ROWS_PER_STEP // length)
        for done in range(0, count, step):
            yield start + done * length, min(step, count - done), length


def _runs_of_equal_length(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, sequences, length) of adjacent sequences of equal length, skipping empty ones."""
    bounds = cu_seqlens.tolist()
    start, count, length = 0, 0, 0
    for begin, end in pairwise(bounds):
        if end - begin != length:
            if count and length:
                yield start, count, length
            start, count, length = begin, 0, end - begin
        count += 1
    if count and length:
        yield start, count, length


def _hidden_keys(length: int, window: int, device: torch.device, *, causal: bool) -> Tensor:
    """Return the keys that a query does not read, `[length, length]` bool."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    return hidden | (distance.abs() >= window) if window else hidden


def _distance_products(q: Tensor, k: Tensor, distances: Distances) -> Tensor:
    """Return what distances add to the products of queries and keys, `[count, heads, queries, keys]`.

    Args:
        q, k: `[count, heads, length, head_dim]`.
        distances: see `attention_varlen`.
    """
    count, heads, length, head_dim = q.shape
    position, reach = torch.arange(length, device=q.device), len(distances.rows) // 2
    distance = (position - position[:, None]).clamp(-reach, reach)
    # [queries, keys]
    rows = distances.rows[distance + reach].long()
    dtype = torch.promote_types(q.dtype, torch.float32)
    total = q.new_zeros(count, heads, length, length, dtype=dtype)

    def products(x: Tensor, table: Tensor, at: Tensor) -> Tensor:
        by_row = x.to(dtype) @ table.to(dtype).view(-1, heads, head_dim).permute(1, 2, 0)
        return by_row.gather(3, at.expand(count, heads, length, length))

    if distances.keys is not None:
        total += products(q, distances.keys, rows)
    if distances.queries is not None:
        total += products(k, distances.queries, rows.t()).transpose(2, 3)
    return total
