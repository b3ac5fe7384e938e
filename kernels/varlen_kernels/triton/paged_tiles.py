"""Tiles of paged attention: the sequence, queries and KV blocks of each program.

All layers of a step read the same table, so their programs search nothing. Its form follows from the shapes of the
step. In a decode step, with at most as many tokens as sequences, a tile is one token. In other steps the first rows are
tiles of several tokens as in `attention_tiles`, and one more row for each sequence follows. Sequences with one new
token are computed by those rows, in splits, and the other sequences by the first ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.attention_checks import check_heads
from varlen_kernels.triton.attention_tiles import (
    BLOCK_BATCH,
    TABLE_LAUNCH,
    block_d,
    count_started,
    mean_length_bucket,
    num_tiles,
)
from varlen_kernels.triton.checks import check_cu_seqlens, check_ids
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.kv_blocks import tile_heads
from varlen_kernels.tuning import Launch, pick

# Columns of the table: first new token and new tokens of the sequence, first query of the tile, tokens before the new
# ones, and the place of its block table.
PAGED_COLUMNS = tl.constexpr(5)

# Largest BLOCK_M, by mean rows of a sequence: larger tiles read the keys fewer times, but leave more rows empty.
_MAX_BLOCK_M = {256: 128, 64: 64, 16: 32, 1: 16}
_MAX_CANDIDATES = 4
# Without this limit, ptxas spills a few registers to fit one more program on a multiprocessor.
_MAX_REGISTERS = 255

# (BLOCK_M, BLOCK_N, num_warps, num_stages), by (BLOCK_D, bytes per element), in ascending order of BLOCK_M.
_TILES: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {
    (64, 2): [(16, 32, 2, 3), (32, 32, 2, 3), (64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)],
    (128, 2): [(16, 32, 2, 3), (32, 32, 4, 3), (64, 32, 4, 3), (64, 64, 8, 2), (128, 32, 8, 3)],
    (256, 2): [(16, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 2)],
    (64, 4): [(16, 32, 4, 2), (32, 32, 4, 2)],
    (128, 4): [(16, 32, 4, 2), (32, 32, 8, 2)],
    (256, 4): [(16, 16, 8, 2)],
}


@triton.jit
def read_paged_tile(
    tiles_ptr,  # [rows, PAGED_COLUMNS], of `paged_tiles`
    row,
):
    """Return the columns of a row: see PAGED_COLUMNS."""
    row_ptr = tiles_ptr + row * PAGED_COLUMNS
    begin, new, first_query = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2)
    return begin, new, first_query, tl.load(row_ptr + 3), tl.load(row_ptr + 4)


@triton.jit(do_not_specialize=["sequences", "tiles", "rows"])
def _paged_tiles_kernel(
    cu_seqlens_ptr,  # [sequences + 1]
    context_lens_ptr,  # [sequences]
    cu_blocks_ptr,  # [sequences + 1]
    table_ptr,  # [rows, PAGED_COLUMNS]
    sequences,
    tiles,
    rows,
    TOKENS: tl.constexpr,  # new tokens of a tile
    IS_DECODE: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    row = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    inside = row < rows
    started = count_started(
        cu_seqlens_ptr, sequences, row, TOKENS, not IS_DECODE, BLOCK_BATCH, BLOCK_TILES
    )
    # after the tiles, a row for each sequence
    is_tile = row < tiles
    owner = tl.where(is_tile, started - 1, row - tiles)
    begin = tl.load(cu_seqlens_ptr + owner, mask=inside, other=0)
    end = tl.load(cu_seqlens_ptr + owner + 1, mask=inside, other=0)
    context = tl.load(context_lens_ptr + owner, mask=inside, other=0)
    first_block = tl.load(cu_blocks_ptr + owner, mask=inside, other=0)
    first_tile = begin // TOKENS
    if not IS_DECODE:
        first_tile += owner

    row_ptr = table_ptr + row * PAGED_COLUMNS
    tl.store(row_ptr, begin, mask=inside)
    tl.store(row_ptr + 1, end - begin, mask=inside)
    tl.store(row_ptr + 2, tl.where(is_tile, (row - first_tile) * TOKENS, 0), mask=inside)
    tl.store(row_ptr + 3, context - (end - begin), mask=inside)
    tl.store(row_ptr + 4, first_block, mask=inside)


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
    """Return the tiles of `attention_paged` with these arguments, see `reference.paged_tiles`.

    The launch decides how many tokens a tile has. Rows of `out` past the last one are not written.

    Raises:
        ValueError: as `attention_paged`; or `out` has another shape, dtype or layout.
    """
    tokens, sequences = len(qkv), len(cu_seqlens) - 1
    head_dim = check_heads(qkv, num_heads, num_kv_heads, cached_dim=key_cache.shape[-1])
    check_cu_seqlens(cu_seqlens)
    check_ids(sequences, context_lens=context_lens)
    check_ids(sequences + 1, cu_blocks=cu_blocks)
    if out is None:
        out = cu_seqlens.new_empty(_table_shape(qkv, cu_seqlens))
    check_paged_tiles(out, qkv, cu_seqlens)
    if tokens == 0 or sequences == 0:
        return out
    heads, _ = tile_heads(num_heads, num_kv_heads)
    is_decode = is_decode_step(tokens, sequences)
    tokens_of_tile, tiles, rows = 1, tokens, tokens
    if not is_decode:
        launch = paged_launch(
            head_dim, key_cache.dtype, window=window, rows=tokens * heads, sequences=sequences
        )
        tokens_of_tile = launch["BLOCK_M"] // heads
        tiles = num_tiles(tokens, sequences, tokens_of_tile)
        rows = tiles + sequences
    _paged_tiles_kernel[(triton.cdiv(rows, TABLE_LAUNCH["BLOCK_TILES"]),)](
        cu_seqlens,
        context_lens,
        cu_blocks,
        out,
        sequences,
        tiles,
        rows,
        TOKENS=tokens_of_tile,
        IS_DECODE=is_decode,
        BLOCK_BATCH=BLOCK_BATCH,
        **TABLE_LAUNCH,
        **dependent_launch(),
    )
    return out


def is_decode_step(tokens: int, sequences: int) -> bool:
    """Return whether a step of these sizes is computed token by token."""
    return tokens <= sequences


def paged_launch(
    head_dim: int, dtype: torch.dtype, *, window: int, rows: int, sequences: int
) -> Launch:
    """Return the launch of the tiles of `attention_paged`.

    Args:
        window: see `attention_paged`.
        rows: new tokens times query heads of a tile.
    """
    key = (head_dim, dtype, window > 0, mean_length_bucket(rows, sequences))
    return pick("attention_paged", key, candidate_launches)


def check_paged_tiles(tiles: Tensor, qkv: Tensor, cu_seqlens: Tensor) -> None:
    """Check that a table has the shape and layout of `paged_tiles` for these tensors.

    Raises:
        ValueError: it has not.
    """
    shape = _table_shape(qkv, cu_seqlens)
    if tiles.shape != shape or tiles.dtype != torch.int32 or not tiles.is_contiguous():
        raise ValueError(
            f"tiles is {list(tiles.shape)} {tiles.dtype}, strides {tiles.stride()};"
            f" it must be {list(shape)} torch.int32, contiguous"
        )


def _table_shape(qkv: Tensor, cu_seqlens: Tensor) -> tuple[int, int]:
    """Return the shape of the table of `paged_tiles`."""
    return len(qkv) + 2 * len(cu_seqlens), PAGED_COLUMNS.value


def candidate_launches(
    head_dim: int, dtype: torch.dtype, has_window: bool, mean_rows: int
) -> list[Launch]:
    """Return the candidate launches for heads of this size; the first is the default.

    Args:
        has_window: part of the key only.
        mean_rows: new tokens of a sequence times query heads of a tile, a bucket as of `mean_length_bucket`.
    """
    del has_window
    # fp8 is widened to 16 bits
    tiles = _TILES[max(64, block_d(head_dim)), max(2, dtype.itemsize)]
    # the largest BLOCK_M that sequences of the mean length fill, then its neighbours
    best = sum(tile[0] <= _MAX_BLOCK_M[mean_rows] for tile in tiles) - 1
    near = sorted(range(len(tiles)), key=lambda i: (abs(i - best), i > best))[:_MAX_CANDIDATES]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    launches = [dict(zip(names, tiles[i], strict=True)) for i in near]
    return [{**launch, "maxnreg": _MAX_REGISTERS} for launch in launches]
