"""Rows held in registers: helpers and launches that the row-wise kernels share.

Triton tensors have power-of-two sizes, so a row is a tuple of tiles: 768 features are three tiles of 256, while one
tensor would need 1,024 elements and leave a quarter unused. A tile is as wide as one warp loads with 128 bits per
thread, so a row of up to 1,024 elements stays inside one warp. Its sum then takes a few shuffles, without shared memory
or a barrier, and the sums of several rows run in parallel.
Source: the batch reduction of Fang et al. 2021, arXiv:2010.05680, section 4.1.2.
"""

import math

import torch
import triton
import triton.language as tl

from varlen_kernels.tuning import Launch

# Widest row that the registers of one program hold.
MAX_ROW = 16_384

_WARP_THREADS = 32
_LOAD_BYTES = 16
_MAX_WARPS = 16
# Elements of one row per thread: more would spill beside the weights, fewer would keep fewer loads in flight.
_MAX_THREAD_VALUES = 32
_MAX_TILES = 16
# A thread with fewer elements of one row works on several rows.
_MIN_THREAD_VALUES = 16


@triton.jit
def load_row(
    row_ptr,  # [ROWS, 1], or one row for all
    row_mask,  # [ROWS, 1], or True
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Return ROWS rows as TILES of [ROWS, BLOCK] fp32, 0 where masked."""
    tiles = tl.tuple(())
    for i in tl.static_range(TILES):
        # broadcast even one shared row to ROWS, so that each warp loads it in the layout it computes in
        col = tl.broadcast_to(i * BLOCK + tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
        tile = tl.load(row_ptr + col, mask=row_mask & (col < width), other=0.0)
        tiles += (tile.to(tl.float32),)
    return tiles


@triton.jit
def store_row(
    row_ptr,  # [ROWS, 1]
    tiles,
    row_mask,  # [ROWS, 1]
    width,
    BLOCK: tl.constexpr,
):
    """Write the first `width` elements of the rows in `row_mask`."""
    for i in tl.static_range(len(tiles)):
        col = i * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(row_ptr + col, tiles[i], mask=row_mask & (col < width))


@triton.jit
def add_rows(a, b):
    """Return the sum of two tuples of tiles, element by element."""
    total = tl.tuple(())
    for i in tl.static_range(len(a)):
        total += (a[i] + b[i],)
    return total


@triton.jit
def sum_row(tiles):
    """Return the sum of each row, [ROWS, 1]."""
    total = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i]
    return tl.sum(total, axis=1, keep_dims=True)


@triton.jit
def sum_of_squares(tiles):
    """Return the sum of the squares of each row, [ROWS, 1]."""
    total = tiles[0] * tiles[0]
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i] * tiles[i]
    return tl.sum(total, axis=1, keep_dims=True)


def vector_width(dtype: torch.dtype, *sizes: int) -> int:
    """Return the elements of one load, for rows that start at multiples of all `sizes`."""
    return math.gcd(_LOAD_BYTES // dtype.itemsize, *sizes)


def fit_block(width: int, widest: int) -> int:
    """Return the tile width: `widest`, halved while that saves a quarter of the padded width."""
    block = widest
    while 4 * _padded(width, block // 2) <= 3 * _padded(width, block):
        block //= 2
    return block


def row_launches(width: int, dtype: torch.dtype, *sizes: int) -> list[Launch]:
    """Return the candidate launches of kernels that hold whole rows; the first is the default.

    Args:
        width: elements of a row, at most MAX_ROW.
        sizes: rows start at multiples of these too.
    """
    vector = vector_width(dtype, width, *sizes)
    warps_per_row = 1
    while width > warps_per_row * _WARP_THREADS * min(_MAX_THREAD_VALUES, _MAX_TILES * vector):
        if warps_per_row == _MAX_WARPS:
            break
        warps_per_row *= 2
    block = fit_block(width, warps_per_row * _WARP_THREADS * vector)
    values = triton.cdiv(width, block) * vector
    min_rows = triton.next_power_of_2(triton.cdiv(_MIN_THREAD_VALUES, values))

    launches: list[Launch] = []
    # the default's programs are small enough to balance the last wave
    for factor, warps in ((1, 4), (1, 2), (1, 1), (1, 8), (2, 4), (2, 1)):
        rows_per_thread = factor * min_rows
        num_warps = max(warps, warps_per_row)
        spills = rows_per_thread * values > 2 * _MAX_THREAD_VALUES
        if spills or (factor > 1 and num_warps == _MAX_WARPS):
            continue
        rows = rows_per_thread * num_warps * _WARP_THREADS * vector // block
        launch = {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}
        if launch not in launches:
            launches.append(launch)
    return launches


def tile_launches(width: int, dtype: torch.dtype, *sizes: int) -> list[Launch]:
    """Return the candidate launches of element-wise kernels, see `row_launches`."""
    vector = vector_width(dtype, width, *sizes)
    launches: list[Launch] = []
    # (loads per thread, warps)
    for loads, warps in ((2, 4), (4, 4), (1, 4), (2, 8), (4, 2)):
        loaded_at_once = warps * _WARP_THREADS * vector
        block = fit_block(width, loaded_at_once)
        rows = loads * loaded_at_once // block
        launches.append({"ROWS": rows, "BLOCK": block, "num_warps": warps})
    return launches


def _padded(width: int, block: int) -> int:
    return triton.cdiv(width, block) * block if block else width
