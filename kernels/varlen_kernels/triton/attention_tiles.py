"""Tiles of attention: the sequence and the queries that a program computes.

The tiles of sequence i start at cu_seqlens[i] // BLOCK_M + i. Each sequence has enough tiles, and at most one more. So
their number follows from the shapes of the batch, and one CUDA graph serves every batch of the same shapes.

A program finds its sequence itself by `find_tile`, or reads it from the table that `attention_tiles` computes once for
all layers of a forward pass.

Paged attention reads the table of `paged_tiles`. In a decode step, with at most as many tokens as sequences, a tile is
one token. In other steps one more row for each sequence follows the tiles; those rows compute sequences with one new
token, in splits.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.attention import Distances
from varlen_kernels.triton.attention_blocks import tile_heads
from varlen_kernels.triton.checks import (
    check_bias,
    check_cu_seqlens,
    check_heads,
    check_ids,
    check_key_lengths,
    check_table,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.tuning import Key, Launch, pick

# Columns of the table: first token and length of the tile's sequence, first query of the tile, and with key lengths
# the number of keys of the sequence.
TILE_COLUMNS = tl.constexpr(3)

# Sequences that a program reads at once to find its own.
BLOCK_BATCH = 256
# Tiles and warps of one program that computes the table.
TABLE_LAUNCH = {"BLOCK_TILES": 32, "num_warps": 4, "enable_fp_fusion": True}
# Lower bounds of the buckets of mean sequence lengths.
_MEAN_LENGTHS = (256, 64, 16, 1)
# Largest BLOCK_M of a default, by mean length: larger tiles read the keys fewer times, but leave more rows empty.
_MAX_BLOCK_M = {256: 64, 64: 64, 16: 32, 1: 16}
_MAX_CANDIDATES = 5
# Heads of one program, where tiles have one warp.
_MAX_HEADS = 4
# Hardware limit per thread. Without it, ptxas spills a few registers to fit one more program on a multiprocessor.
_MAX_REGISTERS = 255

# What is added to the products of queries and keys.
_Form: TypeAlias = Literal["plain", "bias", "distances"]

# (BLOCK_M, BLOCK_N, num_warps, num_stages), by (BLOCK_D, bytes per element, form), in ascending order of BLOCK_M,
# the default of each BLOCK_M last. All fit the registers of sm_90, and of sm_80 but for (128, 128, 8, 2), which
# spills up to 24 bytes there. fp32 needs small tiles: its operands have twice the size, and each product takes three on
# tensor cores. A bias needs small tiles because it is one load per score. One warp exchanges no rows through shared
# memory; two stages leave shared memory for more programs.
_TILES: dict[tuple[int, int, _Form], list[tuple[int, int, int, int]]] = {
    (32, 2, "plain"): [
        (16, 32, 2, 3),
        (16, 16, 1, 2),
        (16, 32, 1, 2),
        (32, 64, 2, 2),
        (32, 32, 2, 3),
        (32, 32, 1, 2),
        (64, 128, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (128, 64, 8, 3),
        (128, 64, 4, 2),
    ],
    (64, 2, "plain"): [
        (16, 32, 2, 3),
        (16, 16, 1, 2),
        (16, 32, 1, 2),
        (32, 64, 2, 2),
        (32, 32, 2, 3),
        (32, 32, 1, 2),
        (64, 128, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    ],
    (64, 2, "bias"): [(16, 32, 2, 2), (32, 32, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)],
    (128, 2, "plain"): [
        (16, 32, 2, 3),
        (32, 32, 2, 3),
        (32, 64, 4, 3),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 8, 3),
    ],
    (128, 2, "bias"): [(16, 32, 2, 2), (32, 32, 4, 2), (64, 32, 8, 2)],
    (256, 2, "plain"): [(16, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2)],
    (256, 2, "bias"): [(16, 32, 4, 2), (32, 32, 8, 2), (32, 32, 4, 2), (64, 32, 8, 1)],
    (64, 2, "distances"): [(16, 16, 2, 2), (16, 16, 1, 2), (32, 32, 8, 1), (32, 32, 4, 2)],
    (128, 2, "distances"): [(16, 32, 4, 1), (16, 16, 2, 2), (32, 32, 8, 1)],
    (64, 4, "plain"): [(16, 32, 4, 2), (32, 32, 4, 2)],
    (64, 4, "distances"): [(16, 16, 4, 1)],
    (64, 4, "bias"): [(16, 32, 4, 2), (32, 16, 4, 2)],
    (128, 4, "plain"): [(16, 32, 4, 2), (32, 32, 8, 2)],
    (128, 4, "bias"): [(16, 32, 4, 2), (32, 32, 8, 2)],
    (256, 4, "plain"): [(16, 32, 8, 2)],
}


@triton.jit
def find_tile(
    cu_seqlens_ptr,  # [batch + 1]
    batch,
    tile,
    BLOCK_M: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
):
    """Return a tile's sequence (its number, first token and length) and the tile's first query.

    The tile belongs to the last sequence whose first tile is not after it. First tiles, starts and ends all ascend from
    sequence to sequence, so maxima find them. A binary search would need dependent loads.
    """
    owners = tl.zeros([BLOCK_BATCH], tl.int32)
    first_tiles = tl.zeros([BLOCK_BATCH], tl.int32)
    begins = tl.zeros([BLOCK_BATCH], tl.int32)
    ends = tl.zeros([BLOCK_BATCH], tl.int32)
    # the first tile of sequence i is tile i or a later one
    for first in range(0, tl.minimum(batch, tile + 1), BLOCK_BATCH):
        sequence = first + tl.arange(0, BLOCK_BATCH)
        begin = tl.load(cu_seqlens_ptr + sequence, mask=sequence < batch, other=0)
        end = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch, other=0)
        first_tile = begin // BLOCK_M + sequence
        started = (first_tile <= tile) & (sequence < batch)
        owners = tl.where(started, sequence, owners)
        first_tiles = tl.where(started, first_tile, first_tiles)
        begins = tl.where(started, begin, begins)
        ends = tl.where(started, end, ends)
    begin = tl.max(begins, axis=0)
    first_query = (tile - tl.max(first_tiles, axis=0)) * BLOCK_M
    return tl.max(owners, axis=0), begin, tl.max(ends, axis=0) - begin, first_query


@triton.jit
def read_tile(
    tiles_ptr,  # [tiles, columns], of `attention_tiles`
    tile,
    HAS_KEY_LENGTHS: tl.constexpr,
):
    """Return a tile's sequence (first token, length), first query, and number of keys."""
    row_ptr = tiles_ptr + tile * (TILE_COLUMNS + HAS_KEY_LENGTHS)
    begin, length, first_query = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2)
    keys = length
    if HAS_KEY_LENGTHS:
        keys = tl.load(row_ptr + TILE_COLUMNS)
    return begin, length, first_query, keys


@triton.jit
def count_started(
    cu_seqlens_ptr,  # [batch + 1]
    batch,
    tile,  # [BLOCK_TILES]
    BLOCK_M: tl.constexpr,
    HAS_SPARE: tl.constexpr,  # whether each sequence has a tile more than it may need
    BLOCK_BATCH: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Return the number of sequences whose first tile is not after each tile."""
    started = tl.zeros([BLOCK_TILES], tl.int32)
    end = batch
    if HAS_SPARE:
        # the first tile of sequence i is tile i or a later one
        end = tl.minimum(batch, tl.max(tile, axis=0) + 1)
    for first in range(0, end, BLOCK_BATCH):
        sequence = first + tl.arange(0, BLOCK_BATCH)
        begin = tl.load(cu_seqlens_ptr + sequence, mask=sequence < batch, other=0)
        first_tile = begin // BLOCK_M
        if HAS_SPARE:
            first_tile += sequence
        is_started = (first_tile[None, :] <= tile[:, None]) & (sequence < batch)[None, :]
        started += tl.sum(is_started.to(tl.int32), axis=1)
    return started


@triton.jit
def masked_keys(
    num_keys,
    tile_query,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_KEY_LENGTHS: tl.constexpr,
    TAIL_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the first key of the masked blocks, and the end of the keys.

    Most blocks need no mask: every query of the tile may read all keys before.
    """
    end = num_keys
    first_masked = num_keys // BLOCK_N * BLOCK_N
    if TAIL_FIRST:
        # one block with at least one key
        first_masked = (num_keys - 1) // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(num_keys, tile_query + BLOCK_M)
        last_read = tile_query
        if HAS_KEY_LENGTHS:
            last_read = tl.minimum(tile_query, num_keys)
        first_masked = last_read // BLOCK_N * BLOCK_N
    elif WINDOW > 0:
        end = tl.minimum(num_keys, tile_query + BLOCK_M + WINDOW - 1)
    # a window is short, so all its blocks are masked
    if WINDOW > 0:
        first_masked = 0
    return first_masked, end


@triton.jit(do_not_specialize=["batch", "tiles"])
def _attention_tiles_kernel(
    cu_seqlens_ptr,  # [batch + 1]
    key_lengths_ptr,  # [batch], read if HAS_KEY_LENGTHS
    table_ptr,  # [tiles, columns]
    batch,
    tiles,
    HAS_KEY_LENGTHS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    started = count_started(cu_seqlens_ptr, batch, tile, BLOCK_M, True, BLOCK_BATCH, BLOCK_TILES)
    owner = started - 1
    inside = tile < tiles
    begin = tl.load(cu_seqlens_ptr + owner, mask=inside, other=0)
    end = tl.load(cu_seqlens_ptr + owner + 1, mask=inside, other=0)
    row_ptr = table_ptr + tile * (TILE_COLUMNS + HAS_KEY_LENGTHS)
    tl.store(row_ptr, begin, mask=inside)
    tl.store(row_ptr + 1, end - begin, mask=inside)
    tl.store(row_ptr + 2, (tile - begin // BLOCK_M - owner) * BLOCK_M, mask=inside)
    if HAS_KEY_LENGTHS:
        keys = tl.load(key_lengths_ptr + owner, mask=inside, other=0)
        tl.store(row_ptr + TILE_COLUMNS, keys, mask=inside)


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
    """Return the tiles of `attention_varlen` with these arguments, see `reference.attention_tiles`.

    The launch decides how many queries a tile has. Rows of `out` past the last tile are not written.

    Raises:
        ValueError: as `attention_varlen`; or `out` has another shape, dtype or layout.
    """
    head_dim = check_heads(qkv, num_heads, num_heads if num_kv_heads is None else num_kv_heads)
    check_cu_seqlens(cu_seqlens)
    check_bias(bias, num_heads)
    check_key_lengths(key_lengths, cu_seqlens)
    tokens, batch = len(qkv), len(cu_seqlens) - 1
    has_key_lengths = key_lengths is not None
    if out is None:
        out = cu_seqlens.new_empty(_table_shape(qkv, cu_seqlens, has_key_lengths))
    check_tiles(out, qkv, cu_seqlens, has_key_lengths=has_key_lengths)
    if tokens == 0 or batch == 0:
        return out
    forms = causal, bias is not None, distances is not None
    launch = attention_launch(head_dim, qkv.dtype, *forms, tokens, batch)
    tiles = num_tiles(tokens, batch, launch["BLOCK_M"])
    _attention_tiles_kernel[(triton.cdiv(tiles, TABLE_LAUNCH["BLOCK_TILES"]),)](
        cu_seqlens,
        cu_seqlens if key_lengths is None else key_lengths,
        out,
        batch,
        tiles,
        HAS_KEY_LENGTHS=has_key_lengths,
        BLOCK_M=launch["BLOCK_M"],
        BLOCK_BATCH=BLOCK_BATCH,
        **TABLE_LAUNCH,
        **dependent_launch(),
    )
    return out


def attention_launch(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    has_bias: bool,
    has_distances: bool,
    tokens: int,
    batch: int,
) -> Launch:
    """Return the launch of `attention_varlen` for a batch of these sizes."""
    forms = causal, has_bias, has_distances
    key: Key = (head_dim, dtype, *forms, mean_length_bucket(tokens, batch))
    return pick("attention_varlen", key, candidate_launches)


def check_tiles(tiles: Tensor, qkv: Tensor, cu_seqlens: Tensor, *, has_key_lengths: bool) -> None:
    """Check that a table has the shape and layout of `attention_tiles` for these tensors.

    Raises:
        ValueError: it has not.
    """
    check_table(_table_shape(qkv, cu_seqlens, has_key_lengths), torch.int32, tiles=tiles)


def _table_shape(qkv: Tensor, cu_seqlens: Tensor, has_key_lengths: bool) -> tuple[int, int]:
    return len(qkv) + len(cu_seqlens), TILE_COLUMNS.value + has_key_lengths


def num_tiles(tokens: int, batch: int, block_m: int) -> int:
    """Return the number of tiles for every batch of these sizes."""
    return tokens // block_m + batch


def mean_length_bucket(tokens: int, batch: int) -> int:
    """Return the bucket of the mean sequence length, which launches depend on."""
    return next(length for length in _MEAN_LENGTHS if tokens >= length * batch or length == 1)


def block_d(head_dim: int) -> int:
    """Return the power of two >= head_dim, at least 16 for tensor cores."""
    return max(16, 1 << (head_dim - 1).bit_length())


def candidate_launches(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,  # noqa: ARG001  # part of the key, because it may change which launch is fastest
    has_bias: bool,
    has_distances: bool,
    mean_length: int,
) -> list[Launch]:
    """Return the candidate launches for heads of this size; the first is the default.

    HEADS is the largest number of heads of one program, and num_warps is the number of warps of each of them.

    Args:
        mean_length: a bucket, see `mean_length_bucket`.
    """
    widths = block_d(head_dim), max(64, block_d(head_dim))
    form: _Form = "distances" if has_distances else "bias" if has_bias else "plain"
    keys = [(width, dtype.itemsize, form) for width in widths]
    tiles = _TILES[next(key for key in keys if key in _TILES)]
    launches: list[Launch] = [
        {**launch, "HEADS": heads}
        for launch in _launches_near(tiles, _MAX_BLOCK_M[mean_length])[:_MAX_CANDIDATES]
        for heads in _heads_of(form, launch["num_warps"])
    ]
    if form != "plain" or dtype.itemsize == 4:
        return [{**launch, "maxnreg": _MAX_REGISTERS} for launch in launches]
    return launches


def _launches_near(tiles: Sequence[tuple[int, int, int, int]], most: int) -> list[Launch]:
    """Return the launches around the last tile with BLOCK_M up to `most`, nearest first."""
    best = sum(tile[0] <= most for tile in tiles) - 1
    near = sorted(range(len(tiles)), key=lambda i: (abs(i - best), i > best))
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    return [dict(zip(names, tiles[i], strict=True)) for i in near]


def _heads_of(form: _Form, num_warps: int) -> tuple[int, ...]:
    """Return the numbers of heads that one program may have.

    A tile of one warp has little work. With four heads, a warp each, there are a quarter of the programs. With
    distances there is enough work.
    """
    return (_MAX_HEADS, 1) if num_warps == 1 and form != "distances" else (1,)


# Columns of the table: first new token and new tokens of the sequence, first query of the tile, tokens before the new
# ones, and the place of its block table.
PAGED_COLUMNS = tl.constexpr(5)

# Largest BLOCK_M, by mean rows of a sequence: larger tiles read the keys fewer times, but leave more rows empty.
_MAX_PAGED_BLOCK_M = {256: 128, 64: 64, 16: 32, 1: 16}
_MAX_PAGED_CANDIDATES = 4

# (BLOCK_M, BLOCK_N, num_warps, num_stages), by (BLOCK_D, bytes per element), in ascending order of BLOCK_M.
_PAGED_TILES: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {
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
        out = cu_seqlens.new_empty(_paged_shape(qkv, cu_seqlens))
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
    return pick("attention_paged", key, paged_launches)


def check_paged_tiles(tiles: Tensor, qkv: Tensor, cu_seqlens: Tensor) -> None:
    """Check that a table has the shape and layout of `paged_tiles` for these tensors.

    Raises:
        ValueError: it has not.
    """
    check_table(_paged_shape(qkv, cu_seqlens), torch.int32, tiles=tiles)


def _paged_shape(qkv: Tensor, cu_seqlens: Tensor) -> tuple[int, int]:
    return len(qkv) + 2 * len(cu_seqlens), PAGED_COLUMNS.value


def paged_launches(
    head_dim: int, dtype: torch.dtype, has_window: bool, mean_rows: int
) -> list[Launch]:
    """Return the candidate launches for heads of this size; the first is the default.

    Args:
        has_window: part of the key only.
        mean_rows: new tokens of a sequence times query heads of a tile, a bucket as of `mean_length_bucket`.
    """
    del has_window
    # fp8 is widened to 16 bits
    tiles = _PAGED_TILES[max(64, block_d(head_dim)), max(2, dtype.itemsize)]
    launches = _launches_near(tiles, _MAX_PAGED_BLOCK_M[mean_rows])[:_MAX_PAGED_CANDIDATES]
    return [{**launch, "maxnreg": _MAX_REGISTERS} for launch in launches]
