"""Embeddings of tokens and positions, and the embedding of BERT with its layer norm.

One program owns ROWS tokens. It reads their ids, loads one row of each table into registers, sums and normalises them,
and writes only the result. Without a norm, a program owns BLOCK features of its tokens. The kernels do not check ids:
they are checked when a request arrives.
Source: Devlin et al. 2019, arXiv:1810.04805, section 3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.checks import check_ids, check_out, check_rows, check_vector, check_width
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.norms import normalize_row
from varlen_kernels.triton.rows import (
    add_rows,
    load_row,
    row_launches,
    store_row,
    tile_launches,
    vector_width,
)
from varlen_kernels.tuning import Launch, pick


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
    """Return the table row of each token's id, as tiles."""
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
    """Embed ROWS tokens, from token `program_id(0) * ROWS` on."""
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
    launch = pick("embed_layer_norm", (hidden, out.dtype), candidate_launches)
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
    """Embed one tile of ROWS tokens by BLOCK features."""
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
    launch = pick("embed", (hidden, out.dtype), candidate_tiles)
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


def candidate_launches(hidden: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for rows of this width; the first is the default."""
    return row_launches(hidden, vector_width(dtype, hidden))


def candidate_tiles(hidden: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches of `embed` for this width; the first is the default."""
    return tile_launches(hidden, vector_width(dtype, hidden))
