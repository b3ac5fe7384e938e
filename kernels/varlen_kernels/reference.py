"""Every op in plain torch: the specification of the kernels, and the CPU path.

All tokens of a batch are in one `[tokens, ...]` tensor, sequence after sequence; `cu_seqlens`
`[batch + 1]` int32 holds the start of each sequence and the end of the last. Each op computes in fp32 for
every dtype, writes into `out=` if it is given, and returns the tensor it wrote. `IN_PLACE` lists the ops
whose `out` may be one of their arguments.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from varlen_kernels import Activation, Pooling
from varlen_kernels.beam_reference import beam_step as beam_step  # noqa: PLC0414  # an op too
from varlen_kernels.sampling_reference import sample_tokens as sample_tokens  # noqa: PLC0414  # an op too
from varlen_kernels.vector_ops import NORM_FLOOR as NORM_FLOOR  # noqa: PLC0414  # kernels read it
from varlen_kernels.vector_ops import concat as concat  # noqa: PLC0414  # an op too
from varlen_kernels.vector_ops import normalize_rows as normalize_rows  # noqa: PLC0414  # an op too
from varlen_kernels.vocabulary_reference import term_weights as term_weights  # noqa: PLC0414  # an op too
from varlen_kernels.vocabulary_reference import top_terms as top_terms  # noqa: PLC0414  # an op too

# For each output of an op, the position of the argument that may be its `out`.
IN_PLACE: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("activate", "add_layer_norm", "layer_norm", "norm_heads", "rms_norm", "rotary", "tanh"),
        (0,),
    ),
    # the sum over `residual`, the norm over `x`
    **dict.fromkeys(("residual_layer_norm", "residual_rms_norm"), (1, 0)),
}

# Activations that GPUs compute in the epilogue of a matrix product, see `linear_activate`.
IN_EPILOGUE: frozenset[Activation] = frozenset({"gelu_tanh", "relu"})

# Rows per step of ops for which torch allocates a temporary result before it is copied into `out`.
_ROWS_PER_STEP = 256


def embed_layer_norm(
    token_ids: Tensor,
    position_ids: Tensor,
    type_ids: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    type_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(token + position + type embedding), `[tokens, hidden]` in the tables' dtype.

    Args:
        token_ids, position_ids, type_ids: `[tokens]` int32 or int64, each inside its table.
        token_table, position_table, type_table: `[rows, hidden]`.
        weight, bias: `[hidden]`.
        eps: added to the variance.
    """
    if out is None:
        out = token_table.new_empty(len(token_ids), token_table.shape[1])
    for rows in _row_slices(len(token_ids)):
        summed = F.embedding(token_ids[rows], token_table)
        summed += F.embedding(position_ids[rows], position_table)
        summed += F.embedding(type_ids[rows], type_table)
        out[rows] = F.layer_norm(summed, weight.shape, weight, bias, eps)
    return out


def embed(
    token_ids: Tensor,
    token_table: Tensor,
    position_ids: Tensor | None = None,
    position_table: Tensor | None = None,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the embedding of each token times scale, plus that of its position: `[tokens, hidden]`.

    Args:
        token_ids, position_ids: `[tokens]` int32 or int64, each inside its table.
        token_table, position_table: `[rows, hidden]`. None for both arguments of positions: they are not added.
        scale: multiplies the embeddings of tokens alone.
    """
    if out is None:
        out = token_table.new_empty(len(token_ids), token_table.shape[1])
    torch.index_select(token_table, 0, token_ids, out=out)
    if position_ids is not None and position_table is not None:
        for rows in _row_slices(len(out)):
            positions = F.embedding(position_ids[rows], position_table)
            torch.add(positions, out[rows], alpha=scale, out=out[rows])
    elif scale != 1:
        out.mul_(scale)
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return x @ weight + bias, `[tokens, features]`.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden, features]`, contiguous. For few tokens, CPUs multiply by this layout faster than
            by torch's `[features, hidden]` (docs/decisions/0002-weights-in-out.md).
        bias: `[features]`.
    """
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)


def activate(
    x: Tensor, bias: Tensor | None = None, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of x + bias: exact (erf) GELU, its tanh form, ReLU or SiLU.

    Args:
        x: `[tokens, features]`.
        bias: `[features]`.
    """
    if bias is not None:
        x = torch.add(x, bias, out=out)
    if kind == "relu":
        return torch.clamp_min(x, 0, out=out)
    if kind == "silu":
        return F.silu(x) if out is None else torch.ops.aten.silu.out(x, out=out)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    if out is None:
        return F.gelu(x, approximate=approximate)
    return torch.ops.aten.gelu.out(x, approximate=approximate, out=out)  # type: ignore[no-any-return]


def linear_activate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return the activation of x @ weight + bias, `[tokens, features]`; see `linear` and `activate`."""
    product = linear(x, weight, bias, out=out)
    return activate(product, kind=kind, out=product)


def activate_gate(x: Tensor, *, kind: Activation, out: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up, `[tokens, features]`.

    Args:
        x: `[tokens, 2 · features]`: the gate of each token, then its up.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = x.chunk(2, dim=1)
    return torch.mul(activate(gate, kind=kind), up, out=out)


def tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return tanh of each element."""
    return torch.tanh(x, out=out)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    x_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(x + x_bias + residual) * weight + bias, `[tokens, hidden]`.

    Args:
        x, residual: `[tokens, hidden]`, one dtype.
        weight, bias: `[hidden]`.
        eps: added to the variance.
        x_bias: `[hidden]`, the bias of the linear layer that computed `x`, if it is not added yet.
    """
    if out is None:
        out = torch.empty_like(x)
    for rows in _row_slices(len(x)):
        total = torch.add(x[rows], residual[rows], out=out[rows])
        if x_bias is not None:
            total += x_bias
        out[rows] = F.layer_norm(total, weight.shape, weight, bias, eps)
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return the layer norm of each token, times weight plus bias: `[tokens, hidden]`.

    Args:
        x: `[tokens, hidden]`.
        weight, bias: `[hidden]`. None for the bias: it is not added.
        eps: added to the variance.
    """
    if out is None:
        out = torch.empty_like(x)
    for rows in _row_slices(len(x)):
        out[rows] = F.layer_norm(x[rows], weight.shape, weight, bias, eps)
    return out


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual, which is the next sublayer's residual, and its layer norm: both `[tokens, hidden]`.

    Args:
        x, residual: `[tokens, hidden]`, one dtype.
        weight, bias: `[hidden]`. None for the bias: it is not added.
        eps: added to the variance.
        out: the sum, which may be `residual`, and the norm, which may be `x`.
    """
    total, normed = out or (torch.empty_like(x), torch.empty_like(x))
    torch.add(x, residual, out=total)
    return total, layer_norm(total, weight, bias, eps=eps, out=normed)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return each token divided by its root mean square, times weight: `[tokens, hidden]`.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden]`.
        eps: added to the mean square.

    Source: Zhang, Sennrich 2019, arXiv:1910.07467.
    """
    if out is None:
        out = torch.empty_like(x)
    _rms_norm(x, weight, eps, out)
    return out


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual, which is the next sublayer's residual, and its RMS norm: both `[tokens, hidden]`.

    Args:
        x, residual: `[tokens, hidden]`, one dtype.
        weight: `[hidden]`.
        eps: added to the mean square.
        out: the sum, which may be `residual`, and the norm, which may be `x`.

    Source: Zhang, Sennrich 2019, arXiv:1910.07467.
    """
    total, normed = out or (torch.empty_like(x), torch.empty_like(x))
    torch.add(x, residual, out=total)
    return total, rms_norm(total, weight, eps=eps, out=normed)


def attention_tiles(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    distance_rows: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    causal: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the tiles of queries of `attention_varlen` with these arguments.

    A row has the first token of a sequence, its length, and the first query of one tile. The tiles of a sequence cover
    its queries. How many queries a tile has is the choice of the device: here a tile is a whole sequence. Tiles
    without queries begin at or after the end of their sequence. Rows past the last tile mean nothing.

    Returns:
        `[len(qkv) + len(cu_seqlens), 3]` int32, more rows than any device needs.

    Args:
        qkv: only its shape and dtype matter.
        cu_seqlens, bias, distance_rows, num_heads, num_kv_heads, causal: see `attention_varlen`.
    """
    del bias, distance_rows, num_heads, num_kv_heads, causal
    batch = len(cu_seqlens) - 1
    if out is None:
        out = cu_seqlens.new_empty(len(qkv) + len(cu_seqlens), 3)
    out[:batch, 0] = cu_seqlens[:-1]
    out[:batch, 1] = cu_seqlens.diff()
    out[:batch, 2] = 0
    return out


def attention_varlen(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,  # noqa: ARG001  # read by GPUs
    distance_rows: Tensor | None = None,
    distance_keys: Tensor | None = None,
    distance_queries: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float,
    causal: bool = False,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale + bias) v inside each sequence, `[tokens, num_heads · head_dim]`.

    Adjacent sequences of equal length share one call of torch, so a batch sorted by length needs few calls.

    With `distance_rows`, the product of a query and a key also has the product of the query with a key of their
    distance, and that of the key with a query of their distance.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: the queries of each token, then its keys, then
            its values.
        cu_seqlens: `[batch + 1]` int32, ascending from 0 to tokens.
        bias: `[num_heads, 2 · reach + 1]`, added to the scaled scores: entry reach + d for a key d tokens after its
            query, where d is clamped to -reach and reach. This covers the relative positions of T5, and ALiBi.
        tiles: of `attention_tiles` with the same arguments, to search `cu_seqlens` once for all layers.
        distance_rows: `[2 · reach + 1]` int32, the row of each distance in the next two tables: entry reach + d for a
            key d tokens after its query, clamped as for the bias.
        distance_keys, distance_queries: `[rows, num_heads · head_dim]` in the dtype of `qkv`. With `distance_rows`, one
            of them at least; `num_kv_heads` is then `num_heads`.
        num_kv_heads: a divisor of `num_heads`; neighbouring heads share a key head. None: as many as `num_heads`.
        scale: multiplies the scores, usually head_dim ** -0.5.

    Source: the products with distances, He et al. 2020, arXiv:2006.03654, section 3.1.
        causal: a token reads only itself and earlier tokens.
        window: a token reads those whose distance is below this; 0 is all.
    """
    tokens, width = qkv.shape
    kv_heads = num_kv_heads or num_heads
    head_dim = width // (num_heads + 2 * kv_heads)
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    for start, count, length in _calls_of_equal_length(cu_seqlens):
        rows = slice(start, start + count * length)
        # [count, heads, length, head_dim] each, views
        q, k, v = (
            heads.view(count, length, -1, head_dim).transpose(1, 2)
            for heads in _heads(qkv[rows], num_heads, kv_heads)
        )
        position = torch.arange(length, device=qkv.device)
        mask = None if bias is None else _bias_by_distance(bias, position, position)
        if distance_rows is not None:
            products = _distance_products(q, k, distance_rows, distance_keys, distance_queries)
            mask = products * scale if mask is None else products * scale + mask
        hidden_keys = None
        if causal or 0 < window < length:
            hidden_keys = _hidden_keys(length, window, qkv.device, causal=causal)
        if mask is not None and hidden_keys is not None:
            mask = mask.masked_fill(hidden_keys, -torch.inf)
        elif hidden_keys is not None and 0 < window < length:
            mask = ~hidden_keys
        context = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=kv_heads != num_heads,
        )
        out[rows].view(count, length, num_heads, head_dim).copy_(context.transpose(1, 2))
    return out


def norm_heads(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return `qkv` with the RMS norm of each query and key head; values are unchanged.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: queries, keys, values of each token.
        query_weight, key_weight: `[head_dim]`.
        eps: added to the mean square.
        out: may be `qkv`.
    """
    out = _copy_unless_same(qkv, out)
    queries, keys, _ = _heads(out, num_heads, num_kv_heads)
    _rms_norm(queries, query_weight, eps, queries)
    _rms_norm(keys, key_weight, eps, keys)
    return out


def rotary(
    qkv: Tensor,
    position_ids: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return `qkv` with rotated queries and keys; values are unchanged.

    Feature i of a head is rotated together with feature i + rotary_dim / 2, by the angle of its position; features
    from rotary_dim on are not rotated.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: queries, keys, values of each token.
        position_ids: `[tokens]` int32.
        cos_sin: `[positions, rotary_dim]` fp32: the cosines of rotary_dim / 2 angles, then their sines.
        out: may be `qkv`.

    Source: Su et al. 2021, arXiv:2104.09864; halves as in GPT-NeoX.
    """
    out = _copy_unless_same(qkv, out)
    queries, keys, _ = _heads(out, num_heads, num_kv_heads)
    half = cos_sin.shape[1] // 2
    for rows in _row_slices(len(out)):
        # [rows, 1, half]
        cos, sin = torch.split(cos_sin.index_select(0, position_ids[rows])[:, None], half, dim=2)
        for heads in (queries[rows], keys[rows]):
            first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
            # in fp32, `first` and `second` are views: the second half is written first
            rotated = first * cos - second * sin
            heads[..., half : 2 * half] = second * cos + first * sin
            heads[..., :half] = rotated
    return out


def append_kv(
    qkv: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Write the keys and values of each token into its slot of the caches.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: queries, keys, values of each token. `num_heads`
            is 0 for keys and values alone: those of an encoder's output, which cross-attention reads.
        slots: `[tokens]` int64, block · block_size + place in the block, no slot twice; -1 writes nothing.
        key_cache, value_cache: `[blocks, num_kv_heads, block_size, head_dim]`, changed in place.
    """
    _, keys, values = _heads(qkv, num_heads, num_kv_heads)
    block_size = key_cache.shape[2]
    written = slots >= 0
    if not bool(written.all()):
        slots, keys, values = slots[written], keys[written], values[written]
    block, place = slots // block_size, slots % block_size
    key_cache[block, :, place] = keys.to(key_cache.dtype)
    value_cache[block, :, place] = values.to(value_cache.dtype)


def paged_tiles(
    qkv: Tensor,
    key_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    cu_blocks: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the tiles of new tokens of `attention_paged` with these arguments.

    A row has the first new token of a sequence, its new tokens, the first query of one tile, the tokens before the new
    ones, and the place of the sequence's blocks in `block_ids`. How many tokens a tile has, and in which order tiles
    come, is the choice of the device: here a tile is a whole sequence. Tiles without queries begin at or after the end
    of their sequence. Rows past the last tile mean nothing.

    Returns:
        `[len(qkv) + 2 · len(cu_seqlens), 5]` int32, more rows than any device needs.

    Args:
        qkv, key_cache: only their shapes and dtypes matter.
        cu_seqlens, context_lens, cu_blocks, num_heads, num_kv_heads, window: see `attention_paged`.
    """
    del key_cache, num_heads, num_kv_heads, window
    if out is None:
        out = cu_seqlens.new_empty(len(qkv) + 2 * len(cu_seqlens), 5)
    new = cu_seqlens.diff()
    columns = cu_seqlens[:-1], new, torch.zeros_like(new), context_lens - new, cu_blocks[:-1]
    torch.stack(columns, dim=1, out=out[: len(new)])
    return out


def attention_paged(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_ids: Tensor,
    cu_blocks: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,  # noqa: ARG001  # an aid of devices
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of new tokens over their sequences' blocks, `[tokens, num_heads · head_dim]`.

    The new tokens of a sequence are the last of its context, and their keys and values are in the caches already. A
    sequence has one new token when it decodes, and several in a chunk of its prompt.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`; only the queries are read. Or queries alone,
            `[tokens, num_heads · head_dim]`, for cross-attention. There each new token is a sequence of its own,
            whose context is the source: the token reads all of it.
        key_cache, value_cache: `[blocks, num_kv_heads, block_size, head_dim]`.
        cu_seqlens: `[sequences + 1]` int32, cumulative starts of the new tokens of each sequence.
        context_lens: `[sequences]` int32, keys of each sequence, those of the new tokens included.
        block_ids: `[blocks in use]` int32, the block table of each sequence, one after the other.
        cu_blocks: `[sequences + 1]` int32, cumulative starts of the block tables.
        bias: finite, by the distance of key and query, see `attention_varlen`.
        tiles: of `paged_tiles` with the same arguments, to search `cu_seqlens` once for all layers.
        num_heads: a multiple of `num_kv_heads`; neighbouring heads share a key head.
        scale: multiplies the scores, usually head_dim ** -0.5.
        window: number of last tokens that a token reads, itself included; 0 is all.

    Source: Kwon et al. 2023, arXiv:2309.06180 (blocks); Ainslie et al. 2023, arXiv:2305.13245 (grouped heads).
    """
    tokens, head_dim = len(qkv), key_cache.shape[3]
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    queries = qkv[:, : num_heads * head_dim].view(tokens, num_heads, head_dim)
    starts = cu_blocks.tolist()
    bounds, lengths = cu_seqlens.tolist(), context_lens.tolist()
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        length = lengths[sequence]
        table = block_ids[starts[sequence] : starts[sequence + 1]]
        # [num_kv_heads, length, head_dim]
        keys, values = (
            cache.index_select(0, table)
            .transpose(0, 1)
            .reshape(num_kv_heads, -1, head_dim)[:, :length]
            for cache in (key_cache, value_cache)
        )
        position = torch.arange(length, device=qkv.device)
        query_position = position[length - (end - begin) :, None]
        readable = position <= query_position
        if window:
            readable &= position > query_position - window
        mask = readable
        if bias is not None:
            mask = _bias_by_distance(bias, query_position[:, 0], position)
            mask = mask.masked_fill(~readable, -torch.inf)
        context = F.scaled_dot_product_attention(
            queries[begin:end].transpose(0, 1)[None].to(keys.dtype),
            keys[None],
            values[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        out[begin:end].view(end - begin, num_heads, head_dim).copy_(context[0].transpose(0, 1))
    return out


def select_rows(x: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the rows of `x` with these indices, `[rows, hidden]`.

    Args:
        x: `[tokens, hidden]`.
        rows: `[rows]` int32.
    """
    return torch.index_select(x, 0, rows, out=out)


def pool(
    x: Tensor,
    cu_seqlens: Tensor,
    normalize: Tensor | None = None,
    *,
    mode: Pooling,
    out: Tensor | None = None,
) -> Tensor:
    """Return one fp32 vector per sequence, `[batch, hidden]`.

    By `mode`, it is the first or last token, or the maximum, the sum or a mean of all tokens. It is 0 for an empty
    sequence.

    Args:
        x: `[tokens, hidden]`.
        cu_seqlens: `[batch + 1]` int32.
        normalize: `[batch]` bool: vectors to divide by their Euclidean norm. None: no vector.
    """
    if mode in {"cls", "last"}:
        pooled = _tokens_or_zeros(x, cu_seqlens, of=mode).float()
    else:
        # "unsafe": x may have tokens past those of the last sequence
        lengths = cu_seqlens.diff().long()
        weighted = x.float() * _places(x, cu_seqlens) if mode == "weighted_mean" else x.float()
        reduce = mode if mode in {"mean", "max"} else "sum"
        pooled = torch.segment_reduce(weighted, reduce, lengths=lengths, axis=0, unsafe=True)
        if mode == "mean_sqrt":
            pooled /= lengths[:, None].sqrt()
        elif mode == "weighted_mean":
            pooled /= (lengths * (lengths + 1) / 2)[:, None]
        pooled.masked_fill_((lengths == 0)[:, None], 0.0)
    if normalize is not None:
        norms = torch.linalg.vector_norm(pooled, dim=1, keepdim=True).clamp_min_(NORM_FLOOR)
        pooled /= torch.where(normalize[:, None], norms, 1.0)
    return _write(pooled, out)


def first_tokens(x: Tensor, cu_seqlens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the first token of each sequence, `[batch, hidden]`; 0 for an empty one."""
    return _write(_tokens_or_zeros(x, cu_seqlens, of="cls"), out)


def to_fp32(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of `x` in fp32."""
    # copy_ converts without a temporary tensor
    return x.to(torch.float32, copy=True) if out is None else out.copy_(x)


def _heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as views, `[tokens, heads, head_dim]` each."""
    heads = [num_heads, num_kv_heads, num_kv_heads]
    by_head = qkv.view(len(qkv), sum(heads), qkv.shape[1] // sum(heads))
    queries, keys, values = torch.split(by_head, heads, dim=1)
    return queries, keys, values


def _rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write the RMS norm of the last axis into `out`, which may be `x`."""
    if x.dtype == torch.float32:
        # without a temporary tensor of the size of x, unlike torch's rms_norm
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        torch.mul(x, scale, out=out).mul_(weight)
        return
    for rows in _row_slices(len(x)):
        out[rows] = F.rms_norm(x[rows], weight.shape, weight, eps)


def _copy_unless_same(x: Tensor, out: Tensor | None) -> Tensor:
    """Return `out` with the content of `x`: a copy, unless they are the same memory."""
    if out is None:
        return x.clone()
    return out if out.data_ptr() == x.data_ptr() else out.copy_(x)


def _row_slices(rows: int) -> Iterator[slice]:
    """Yield consecutive slices of the rows, so that temporary results stay small."""
    for begin in range(0, rows, _ROWS_PER_STEP):
        yield slice(begin, min(begin + _ROWS_PER_STEP, rows))


def _calls_of_equal_length(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, sequences, length) of each call: parts of the runs of equal length.

    A call has at most _ROWS_PER_STEP tokens, or one sequence.
    """
    for start, count, length in _runs_of_equal_length(cu_seqlens):
        step = max(1, _ROWS_PER_STEP // length)
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


def _tokens_or_zeros(x: Tensor, cu_seqlens: Tensor, of: Pooling) -> Tensor:
    """Return the first ("cls") or last token of each sequence; 0 for an empty one."""
    if len(x) == 0:
        return x.new_zeros(len(cu_seqlens) - 1, x.shape[1])
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    # the index of an empty sequence is clamped to any token, which is then masked
    index = (starts if of == "cls" else ends - 1).clamp(0, len(x) - 1)
    return x.index_select(0, index).masked_fill_((starts == ends)[:, None], 0.0)


def _places(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the place of each token in its sequence, from 1: `[tokens, 1]` fp32."""
    tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)
    # a token past the last sequence counts from its end
    sequences = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    return (tokens - cu_seqlens[sequences] + 1)[:, None].float()


def _hidden_keys(length: int, window: int, device: torch.device, *, causal: bool) -> Tensor:
    """Return the keys that a query does not read, `[length, length]` bool."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    return hidden | (distance.abs() >= window) if window else hidden


def _bias_by_distance(bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the bias of queries and keys at these positions, `[num_heads, queries, keys]`."""
    reach = bias.shape[1] // 2
    distance = (keys - queries[:, None]).clamp(-reach, reach)
    return bias[:, distance + reach].float()


def _distance_products(
    q: Tensor,
    k: Tensor,
    distance_rows: Tensor,
    distance_keys: Tensor | None,
    distance_queries: Tensor | None,
) -> Tensor:
    """Return what distances add to the products of queries and keys, `[count, heads, queries, keys]`.

    Args:
        q, k: `[count, heads, length, head_dim]`.
        distance_rows, distance_keys, distance_queries: see `attention_varlen`.
    """
    count, heads, length, head_dim = q.shape
    position, reach = torch.arange(length, device=q.device), len(distance_rows) // 2
    distance = (position - position[:, None]).clamp(-reach, reach)
    # [queries, keys]
    rows = distance_rows[distance + reach].long()
    dtype = torch.promote_types(q.dtype, torch.float32)
    total = q.new_zeros(count, heads, length, length, dtype=dtype)

    def products(x: Tensor, table: Tensor, at: Tensor) -> Tensor:
        by_row = x.to(dtype) @ table.to(dtype).view(-1, heads, head_dim).permute(1, 2, 0)
        return by_row.gather(3, at.expand(count, heads, length, length))

    if distance_keys is not None:
        total += products(q, distance_keys, rows)
    if distance_queries is not None:
        total += products(k, distance_queries, rows.t()).transpose(2, 3)
    return total


def _write(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)
