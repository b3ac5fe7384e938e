"""Rows held in registers: what the row-wise kernels share.

Triton's tensors have powers of two as sizes, so a row is held as a tuple of tiles: 768 features are three
tiles of 256, without the quarter of idle lanes that one tensor of 1,024 would have. A tile is as wide as the
lanes of one warp reach with loads of 128 bits, so a row of up to 1,024 elements stays inside a warp: its sum is
a few shuffles, without shared memory or a barrier, and the sums of several rows run side by side.
Source: the batch reduction of Fang et al. 2021, arXiv:2010.05680, section 4.1.2.
"""

import math

import torch
import triton
import triton.language as tl

from varlen_kernels.tuning import Launch

# Wider rows would not stay in the registers of one program.
MAX_ROW = 16_384

_LANES = 32
_LOAD_BYTES = 16
_MAX_WARPS = 16
# Held by a lane, of one row: more of them spill beside weights; fewer leave less to load at once.
_MOST_VALUES = 32
_MOST_TILES = 16
# A lane with fewer of its own works on several rows.
_FEWEST_VALUES = 16


@triton.jit
def load_row(
    row_ptr,  # [ROWS, 1], or one row for all
    here,  # [ROWS, 1], which rows there are; or True
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Return a row as TILES of [ROWS, BLOCK] fp32, 0 from `width` on and where a row is not here."""
    tiles = tl.tuple(())
    for i in tl.static_range(TILES):
        # of all ROWS even if they are one: each warp then loads what it needs, in the layout it needs
        col = tl.broadcast_to(i * BLOCK + tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
        tile = tl.load(row_ptr + col, mask=here & (col < width), other=0.0)
        tiles += (tile.to(tl.float32),)
    return tiles


@triton.jit
def store_row(
    row_ptr,  # [ROWS, 1]
    tiles,
    here,  # [ROWS, 1]
    width,
    BLOCK: tl.constexpr,
):
    """Write the first `width` elements of the rows that are here."""
    for i in tl.static_range(len(tiles)):
        col = i * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(row_ptr + col, tiles[i], mask=here & (col < width))


@triton.jit
def add_rows(a, b):
    """Return a + b."""
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


@triton.jit
def max_row(tiles):
    """Return the maximum of each row, [ROWS, 1]."""
    top = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        top = tl.maximum(top, tiles[i])
    return tl.max(top, axis=1, keep_dims=True)


def vector_width(dtype: torch.dtype, *sizes: int) -> int:
    """Return how many elements one load may take where every row starts at a multiple of all `sizes`."""
    return math.gcd(_LOAD_BYTES // dtype.itemsize, *sizes)


def fit_block(width: int, widest: int) -> int:
    """Return the tile for rows of `width`: `widest`, halved for as long as that frees a quarter of the lanes."""
    block = widest
    while 4 * _padded(width, block // 2) <= 3 * _padded(width, block):
        block //= 2
    return block


def row_launches(width: int, vector: int) -> list[Launch]:
    """Return launches for kernels that hold whole rows, the first for a GPU on which none was measured.

    Args:
        width: of a row, at most MAX_ROW.
        vector: elements of one load, as `vector_width` says.
    """
    warps_a_row = 1
    while width > warps_a_row * _LANES * min(_MOST_VALUES, _MOST_TILES * vector):
        if warps_a_row == _MAX_WARPS:
            break
        warps_a_row *= 2
    block = fit_block(width, warps_a_row * _LANES * vector)
    values = triton.cdiv(width, block) * vector
    deep = triton.next_power_of_2(triton.cdiv(_FEWEST_VALUES, values))

    launches: list[Launch] = []
    # rows a lane takes part in, warps: four rows a program are small enough to balance the last wave
    for depth, warps in ((deep, 4), (deep, 2), (deep, 1), (deep, 8), (2 * deep, 4), (2 * deep, 1)):
        num_warps = max(warps, warps_a_row)
        if depth * values > 2 * _MOST_VALUES or (depth > deep and num_warps == _MAX_WARPS):
            continue
        rows = depth * num_warps * _LANES * vector // block
        launch = {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}
        if launch not in launches:
            launches.append(launch)
    return launches


def tile_launches(width: int, vector: int) -> list[Launch]:
    """Return launches for kernels that cut rows into tiles of [ROWS, BLOCK] and sum nothing over a row.

    Args:
        width: of a row.
        vector: elements of one load, as `vector_width` says.
    """
    launches: list[Launch] = []
    # vectors of a lane, warps
    for vectors, warps in ((2, 4), (4, 4), (1, 4), (2, 8), (4, 2)):
        in_one_go = warps * _LANES * vector
        block = fit_block(width, in_one_go)
        rows = vectors * in_one_go // block
        launches.append({"ROWS": rows, "BLOCK": block, "num_warps": warps})
    return launches


def _padded(width: int, block: int) -> int:
    """Return the lanes that a row takes."""
    return triton.cdiv(width, block) * block if block else width
