"""The order of codes in panels, for products in int8 and int4 (`int8_panels`)."""

import torch
from torch import Tensor

from varlen_kernels.cpu.native.target_cpu import target_cpu
from varlen_kernels.reference.linear_int8 import FULL_LEVELS, REDUCED_LEVELS

# Columns that one instruction multiplies and sums.
DEPTH = 4


def has_dot_products() -> bool:
    """Return whether the CPU has VNNI with AVX-512."""
    return target_cpu().has("avx512vnni")


def panel_levels() -> int:
    """Return the largest row code whose sums are exact: AVX2 adds in 16 bits."""
    return FULL_LEVELS if has_dot_products() else REDUCED_LEVELS


# Rows and features of a tile, and numbers of 32 bits in a register.
TILE_ROWS, TILE_FEATURES, WIDTH = (6, 64, 16) if has_dot_products() else (4, 16, 8)


def pack_panels(codes: Tensor) -> Tensor:
    """Return the codes of a weight in the order in which `multiply_rows` reads them.

    Args:
        codes: `[hidden, features]` int8.

    Returns:
        `[features / TILE_FEATURES, hidden * TILE_FEATURES]` int8, both rounded up with zeros.
    """
    return _panels(codes, DEPTH).flatten(1)


def pack_halves(codes: Tensor) -> Tensor:
    """Return codes of 4 bits in the order in which `multiply_rows` reads them.

    A byte has the codes of two columns, `DEPTH` apart, plus 8: the first in its lower half.

    Args:
        codes: `[hidden, features]` int8, from -8 to 7.

    Returns:
        `[features / TILE_FEATURES, hidden * TILE_FEATURES / 2]` uint8, both rounded up with codes 0.
    """
    panels = (_panels(codes, 2 * DEPTH) + 8).to(torch.uint8)
    return (panels[:, ::2] | panels[:, 1::2] << 4).flatten(1)


def _panels(codes: Tensor, multiple: int) -> Tensor:
    """Return codes by panel, by `DEPTH` columns, with zeros up to a multiple of columns."""
    hidden, features = codes.shape
    panels, columns = -(-features // TILE_FEATURES), -(-hidden // multiple) * multiple
    padded = torch.zeros(panels * TILE_FEATURES, columns, dtype=torch.int8)
    padded[:features, :hidden] = codes.t()
    # the DEPTH codes of a feature move as one number: bytes take seven times as long
    parts = padded.view(torch.int32).view(panels, TILE_FEATURES, -1).transpose(1, 2)
    return parts.contiguous().view(torch.int8).view(panels, columns // DEPTH, -1)
