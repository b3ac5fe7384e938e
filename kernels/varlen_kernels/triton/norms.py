"""Layer norm, RMS norm, norms of heads, rotary positions and embeddings, each in one pass.

One program owns ROWS tokens. Each token is in the registers of one warp if it is short enough, see rows.py. Mean and
variance are two sums over registers, so nothing cancels in the variance. Without a norm, a program of an embedding owns
BLOCK features of its tokens. Ids are not checked: they are when a request arrives.
Source: Ba, Kiros, Hinton 2016, arXiv:1607.06450; Zhang, Sennrich 2019, arXiv:1910.07467; Su et al. 2021,
arXiv:2104.09864 (rotary positions); Devlin et al. 2019, arXiv:1810.04805, section 3 (embeddings).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.torch_parts import copy_unless_same
from varlen_kernels.triton.checks import (
    MAX_HEAD_DIM,
    check_dtype,
    check_ids,
    check_out,
    check_row_layout,
    check_rows,
    check_vector,
    check_width,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.rows import (
    add_rows,
    load_row,
    row_launches,
    store_row,
    sum_of_squares,
    sum_row,
    tile_launches,
)
from varlen_kernels.tuning import Launch, pick


@triton.jit
def normalize_row(
    x,  # TILES of [ROWS, BLOCK], from `load_row`
    weight_ptr,  # [HIDDEN]
    bias_ptr,  # [HIDDEN], read if HAS_BIAS
    eps,
    HIDDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CENTERED: tl.constexpr = True,
):
    """Return the layer norm of rows in registers, or without centering the RMS norm."""
    centered = x
    if IS_CENTERED:
        mean = sum_row(x) / HIDDEN
        centered = tl.tuple(())
        for i in tl.static_range(len(x)):
            # columns past HIDDEN hold -mean after centering, and must be 0 for the variance
            inside = i * BLOCK + tl.arange(0, BLOCK)[None, :] < HIDDEN
            centered += (tl.where(inside, x[i] - mean, 0.0),)
    scale = tl.rsqrt(sum_of_squares(centered) / HIDDEN + eps)

    weight = load_row(weight_ptr, True, HIDDEN, ROWS, BLOCK, len(x))
    normed = tl.tuple(())
    for i in tl.static_range(len(x)):
        normed += (centered[i] * scale * weight[i],)
    if HAS_BIAS:
        normed = add_rows(normed, load_row(bias_ptr, True, HIDDEN, ROWS, BLOCK, len(x)))
    return normed


@triton.jit(do_not_specialize=["tokens"])
def _norm_kernel(
    x_ptr,  # [tokens, HIDDEN]
    residual_ptr,  # [tokens, HIDDEN], read if HAS_RESIDUAL
    weight_ptr,  # [HIDDEN]
    bias_ptr,  # [HIDDEN], read if HAS_BIAS
    sum_ptr,  # [tokens, HIDDEN], written if HAS_SUM; may be residual_ptr
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    SUM_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SUM: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # TILES * BLOCK >= HIDDEN
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    # int64: tokens * HIDDEN may pass 2**31
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = token < tokens

    x = load_row(x_ptr + token * X_STRIDE, row_mask, HIDDEN, ROWS, BLOCK, TILES)
    if HAS_RESIDUAL:
        row_ptr = residual_ptr + token * RESIDUAL_STRIDE
        x = add_rows(x, load_row(row_ptr, row_mask, HIDDEN, ROWS, BLOCK, TILES))
    if HAS_SUM:
        store_row(sum_ptr + token * SUM_STRIDE, x, row_mask, HIDDEN, BLOCK)
    normed = normalize_row(x, weight_ptr, bias_ptr, eps, HIDDEN, HAS_BIAS, ROWS, BLOCK, IS_CENTERED)
    store_row(out_ptr + token * OUT_STRIDE, normed, row_mask, HIDDEN, BLOCK)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(x + residual) * weight + bias, see `reference.add_layer_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    return _launch("add_layer_norm", x, weight, bias, eps, out, residual=residual)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return the layer norm of each token, see `reference.layer_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    return _launch("layer_norm", x, weight, bias, eps, out)


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual and its layer norm, see `reference.residual_layer_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    total, normed = out or (torch.empty_like(x), None)
    op = "residual_layer_norm"
    return total, _launch(op, x, weight, bias, eps, normed, residual=residual, sum_out=total)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return the RMS norm of x, times weight, see `reference.rms_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    return _launch("rms_norm", x, weight, None, eps, out, is_centered=False)


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual and its RMS norm, see `reference.residual_rms_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    total, normed = out or (torch.empty_like(x), None)
    return total, _launch(
        "residual_rms_norm",
        x,
        weight,
        None,
        eps,
        normed,
        residual=residual,
        sum_out=total,
        is_centered=False,
    )


def _launch(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None,
    *,
    residual: Tensor | None = None,
    sum_out: Tensor | None = None,
    is_centered: bool = True,
) -> Tensor:
    out = torch.empty_like(x, dtype=weight.dtype) if out is None else out
    check_rows(x, residual=residual, sum_out=sum_out)
    check_dtype(weight=weight)
    check_out(out, x.shape, weight.dtype)
    tokens, hidden = x.shape
    check_width(hidden)
    check_vector(hidden, weight=weight, bias=bias)
    if tokens == 0:
        return out
    launch = pick(op, (hidden, x.dtype), row_launches)
    _norm_kernel[(triton.cdiv(tokens, launch["ROWS"]),)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out if sum_out is None else sum_out,
        out,
        tokens,
        eps,
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=0 if residual is None else residual.stride(0),
        SUM_STRIDE=0 if sum_out is None else sum_out.stride(0),
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        HAS_SUM=sum_out is not None,
        IS_CENTERED=is_centered,
        TILES=triton.cdiv(hidden, launch["BLOCK"]),
        **launch,
        **dependent_launch(),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _norm_heads_kernel(
    qkv_ptr,  # [tokens, QUERIES + 2 * KEYS, HEAD_DIM]; queries and keys are changed in place
    query_weight_ptr,  # [HEAD_DIM]
    key_weight_ptr,  # [HEAD_DIM]
    tokens,
    eps,
    STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # TILES * BLOCK >= HEAD_DIM
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    # int64: tokens * STRIDE may pass 2**31
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // (QUERIES + KEYS)
    head = row % (QUERIES + KEYS)
    row_mask = token < tokens
    row_ptr = qkv_ptr + token * STRIDE + head * HEAD_DIM

    x = load_row(row_ptr, row_mask, HEAD_DIM, ROWS, BLOCK, TILES)
    scale = tl.rsqrt(sum_of_squares(x) / HEAD_DIM + eps)
    query_weight = load_row(query_weight_ptr, True, HEAD_DIM, ROWS, BLOCK, TILES)
    key_weight = load_row(key_weight_ptr, True, HEAD_DIM, ROWS, BLOCK, TILES)
    normed = tl.tuple(())
    for i in tl.static_range(TILES):
        weight = tl.where(head < QUERIES, query_weight[i], key_weight[i])
        normed += (x[i] * scale * weight,)
    store_row(row_ptr, normed, row_mask, HEAD_DIM, BLOCK)


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
    """Return `qkv` with normalised query and key heads, see `reference.norm_heads`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or a head has more than MAX_HEAD_DIM features.
    """
    head_dim = _checked_head_dim(qkv, num_heads, num_kv_heads, out)
    check_vector(head_dim, query_weight=query_weight, key_weight=key_weight)
    out = copy_unless_same(qkv, out)
    if len(qkv) == 0:
        return out
    launch = pick("norm_heads", (head_dim, qkv.dtype), row_launches)
    heads = len(qkv) * (num_heads + num_kv_heads)
    _norm_heads_kernel[(triton.cdiv(heads, launch["ROWS"]),)](
        out,
        query_weight,
        key_weight,
        len(qkv),
        eps,
        STRIDE=out.stride(0),
        QUERIES=num_heads,
        KEYS=num_kv_heads,
        HEAD_DIM=head_dim,
        TILES=triton.cdiv(head_dim, launch["BLOCK"]),
        **launch,
        **dependent_launch(),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _rotary_kernel(
    qkv_ptr,  # [tokens, HEADS + values, HEAD_DIM]; the first HEADS are changed in place
    position_ids_ptr,  # [tokens]
    cos_sin_ptr,  # [positions, 2 * HALF]
    tokens,
    STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= HALF
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    # int64: tokens * STRIDE may pass 2**31
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    position = tl.load(position_ids_ptr + token, mask=token < tokens, other=0).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (col < HALF)

    angle_ptr = cos_sin_ptr + position[:, None] * TABLE_STRIDE + col
    cos = tl.load(angle_ptr, mask=inside, other=0.0)
    sin = tl.load(angle_ptr + HALF, mask=inside, other=0.0)
    first_ptr = qkv_ptr + (token * STRIDE + row % HEADS * HEAD_DIM)[:, None] + col
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(first_ptr, first * cos - second * sin, mask=inside)
    tl.store(first_ptr + HALF, second * cos + first * sin, mask=inside)


def rotary(
    qkv: Tensor,
    position_ids: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return `qkv` with rotated queries and keys, see `reference.rotary`.

    Every position must be inside the table: the kernel would read memory past it for any other position.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, the table is not fp32, or has more columns
            than a head has features; or a head has more than MAX_HEAD_DIM features.
    """
    head_dim = _checked_head_dim(qkv, num_heads, num_kv_heads, out)
    check_ids(len(qkv), position_ids=position_ids)
    check_row_layout(cos_sin=cos_sin)
    rotary_dim = cos_sin.shape[1]
    if cos_sin.dtype != torch.float32 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"cos_sin is {list(cos_sin.shape)} {cos_sin.dtype}; it must be [positions, an even number up to"
            f" {head_dim}] torch.float32"
        )
    out = copy_unless_same(qkv, out)
    if len(qkv) == 0:
        return out
    launch = pick("rotary", (rotary_dim // 2, head_dim, qkv.dtype), candidate_rotary_launches)
    heads = num_heads + num_kv_heads
    _rotary_kernel[(triton.cdiv(len(qkv) * heads, launch["ROWS"]),)](
        out,
        position_ids,
        cos_sin,
        len(qkv),
        STRIDE=out.stride(0),
        TABLE_STRIDE=cos_sin.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        **launch,
        **dependent_launch(),
    )
    return out


def candidate_rotary_launches(half: int, head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches of `rotary`; the first is the default.

    Args:
        half: half of the rotated features of a head.
    """
    return tile_launches(half, dtype, head_dim)


def _checked_head_dim(qkv: Tensor, num_heads: int, num_kv_heads: int, out: Tensor | None) -> int:
    check_dtype(qkv=qkv)
    check_row_layout(qkv=qkv)
    head_dim, rest = divmod(qkv.shape[1], num_heads + 2 * num_kv_heads)
    if rest or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"qkv has {qkv.shape[1]} features for {num_heads} + 2 x {num_kv_heads} heads; allowed: 1 to"
            f" {MAX_HEAD_DIM} for each head"
        )
    if out is not None:
        check_out(out, tuple(qkv.shape), qkv.dtype)
    return head_dim


@triton.jit
def _load_embedding(
    ids_ptr,  # [tokens]
    table_ptr,  # [rows, HIDDEN]
    token,  # [ROWS]
    tokens,
    STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    # int64: a table may have more than 2**31 elements
    row = tl.load(ids_ptr + token, mask=token < tokens, other=0).to(tl.int64)[:, None]
    return load_row(table_ptr + row * STRIDE, (token < tokens)[:, None], HIDDEN, ROWS, BLOCK, TILES)


@triton.jit(do_not_specialize=["tokens"])
def _embed_layer_norm_kernel(
    token_ids_ptr,  # [tokens]
    position_ids_ptr,  # [tokens]
    type_ids_ptr,  # [tokens]
    token_table_ptr,  # [vocabulary, HIDDEN]
    position_table_ptr,  # [positions, HIDDEN]
    type_table_ptr,  # [types, HIDDEN]
    weight_ptr,  # [HIDDEN]
    bias_ptr,  # [HIDDEN]
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    eps,
    TOKEN_STRIDE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    TYPE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # TILES * BLOCK >= HIDDEN
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    # int64: tokens * HIDDEN may pass 2**31
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)

    x = _load_embedding(
        token_ids_ptr, token_table_ptr, token, tokens, TOKEN_STRIDE, HIDDEN, ROWS, BLOCK, TILES
    )
    position = _load_embedding(
        position_ids_ptr,
        position_table_ptr,
        token,
        tokens,
        POSITION_STRIDE,
        HIDDEN,
        ROWS,
        BLOCK,
        TILES,
    )
    token_type = _load_embedding(
        type_ids_ptr, type_table_ptr, token, tokens, TYPE_STRIDE, HIDDEN, ROWS, BLOCK, TILES
    )
    x = add_rows(add_rows(x, position), token_type)
    normed = normalize_row(x, weight_ptr, bias_ptr, eps, HIDDEN, True, ROWS, BLOCK)
    token = token[:, None]
    store_row(out_ptr + token * OUT_STRIDE, normed, token < tokens, HIDDEN, BLOCK)


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
    """Return layer_norm(token + position + type embedding), see `reference.embed_layer_norm`.

    Every id must be inside its table: the kernel would read memory past the table for any other id.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    tables = {
        "token_table": token_table,
        "position_table": position_table,
        "type_table": type_table,
    }
    tokens, hidden = len(token_ids), token_table.shape[-1]
    out = token_table.new_empty(tokens, hidden) if out is None else out
    check_ids(tokens, token_ids=token_ids, position_ids=position_ids, type_ids=type_ids)
    for name, table in tables.items():
        # only the first rows, because tables differ in their number of rows
        check_rows(token_table[:1], **{name: table[:1]})
    check_out(out, (tokens, hidden), token_table.dtype)
    check_width(hidden)
    check_vector(hidden, weight=weight, bias=bias)
    if tokens == 0:
        return out
    launch = pick("embed_layer_norm", (hidden, out.dtype), row_launches)
    _embed_layer_norm_kernel[(triton.cdiv(tokens, launch["ROWS"]),)](
        token_ids,
        position_ids,
        type_ids,
        token_table,
        position_table,
        type_table,
        weight,
        bias,
        out,
        tokens,
        eps,
        TOKEN_STRIDE=token_table.stride(0),
        POSITION_STRIDE=position_table.stride(0),
        TYPE_STRIDE=type_table.stride(0),
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        TILES=triton.cdiv(hidden, launch["BLOCK"]),
        **launch,
        **dependent_launch(),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _embed_kernel(
    token_ids_ptr,  # [tokens]
    token_table_ptr,  # [vocabulary, HIDDEN]
    position_ids_ptr,  # [tokens], read if HAS_POSITIONS
    position_table_ptr,  # [positions, HIDDEN], read if HAS_POSITIONS
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    TOKEN_STRIDE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    # int64: tokens * HIDDEN may pass 2**31, and so may a table
    token = (tl.program_id(0) // TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (col < HIDDEN)

    row = tl.load(token_ids_ptr + token, mask=token < tokens, other=0).to(tl.int64)[:, None]
    x = tl.load(token_table_ptr + row * TOKEN_STRIDE + col, mask=inside, other=0.0).to(tl.float32)
    x *= SCALE
    if HAS_POSITIONS:
        row = tl.load(position_ids_ptr + token, mask=token < tokens, other=0).to(tl.int64)[:, None]
        position_ptr = position_table_ptr + row * POSITION_STRIDE + col
        x += tl.load(position_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token[:, None] * OUT_STRIDE + col, x, mask=inside)


def embed(
    token_ids: Tensor,
    token_table: Tensor,
    position_ids: Tensor | None = None,
    position_table: Tensor | None = None,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the scaled embedding of each token, plus the embedding of its position, see `reference.embed`.

    Every id must be inside its table: the kernel would read memory past the table for any other id.

    Raises:
        ValueError: shapes or dtypes disagree, or rows are not contiguous.
    """
    tokens, hidden = len(token_ids), token_table.shape[-1]
    out = token_table.new_empty(tokens, hidden) if out is None else out
    check_ids(tokens, token_ids=token_ids)
    has_positions = position_ids is not None and position_table is not None
    if position_ids is None or position_table is None:
        position_ids, position_table = token_ids, token_table
    check_ids(tokens, position_ids=position_ids)
    check_rows(token_table[:1], position_table=position_table[:1])
    check_out(out, (tokens, hidden), token_table.dtype)
    if out.numel() == 0:
        return out
    launch = pick("embed", (hidden, out.dtype), tile_launches)
    tiles = triton.cdiv(tokens, launch["ROWS"]) * triton.cdiv(hidden, launch["BLOCK"])
    _embed_kernel[(tiles,)](
        token_ids,
        token_table,
        position_ids,
        position_table,
        out,
        tokens,
        TOKEN_STRIDE=token_table.stride(0),
        POSITION_STRIDE=position_table.stride(0),
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        SCALE=scale,
        HAS_POSITIONS=has_positions,
        **launch,
        **dependent_launch(),
    )
    return out
