"""Tiles of attention: the sequence and the queries that a program computes.

The tiles of sequence i start at cu_seqlens[i] // BLOCK_M + i. Each sequence has enough tiles for its length, and at
most one more. So the number of tiles follows from the shapes of the batch: the host needs no sequence length, and one
CUDA graph serves every batch of the same shapes.

A program finds its sequence itself by `find_tile`, or reads it from the table that `attention_tiles` computes once for
all layers of a forward pass.
"""

from typing import Literal, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.attention import Distances
from varlen_kernels.triton.attention_checks import check_bias, check_heads, check_key_lengths
from varlen_kernels.triton.checks import check_cu_seqlens
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
# Hardware limit per thread.
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
    shape = _table_shape(qkv, cu_seqlens, has_key_lengths)
    if tiles.shape != shape or tiles.dtype != torch.int32 or not tiles.is_contiguous():
        raise ValueError(
            f"tiles is {list(tiles.shape)} {tiles.dtype}, strides {tiles.stride()};"
            f" it must be {list(shape)} torch.int32, contiguous"
        )


def _table_shape(qkv: Tensor, cu_seqlens: Tensor, has_key_lengths: bool) -> tuple[int, int]:
    """Return the shape of the table of `attention_tiles`."""
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
    # the last launch of the largest BLOCK_M for the mean length, then its neighbours
    fitting = [tile for tile in tiles if tile[0] <= _MAX_BLOCK_M[mean_length]]
    best = len(fitting) - 1
    near = sorted(range(len(tiles)), key=lambda i: (abs(i - best), i > best))[:_MAX_CANDIDATES]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    launches: list[Launch] = [
        {**dict(zip(names, tiles[i], strict=True)), "HEADS": heads}
        for i in near
        for heads in _heads_of(form, num_warps=tiles[i][2])
    ]
    if form != "plain" or dtype.itemsize == 4:
        # without this limit, ptxas spills a few registers to fit one more program on a multiprocessor
        return [{**launch, "maxnreg": _MAX_REGISTERS} for launch in launches]
    return launches


def _heads_of(form: _Form, num_warps: int) -> tuple[int, ...]:
    """Return the numbers of heads that one program may have.

    A tile of one warp has little work. With four heads, a warp each, there are a quarter of the programs. With
    distances there is enough work.
    """
    return (_MAX_HEADS, 1) if num_warps == 1 and form != "distances" else (1,)
