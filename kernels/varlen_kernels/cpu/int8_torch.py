"""Linear layers in int8 on CPUs: products by torch, conversions by numba.

`torch._int_mm` takes signed codes and is fast where the CPU has int8 instructions (VNNI, AMX); without them it may be a
plain loop. The linear layer of oneDNN takes unsigned codes and prepacked weights. Both may saturate on CPUs with only
AVX2, which sum two products in 16 bits: then codes have 7 bits.
Source: the specification is `reference.linear_int8.linear_int8`; docs/operating/int8.md has measurements.
"""

from functools import lru_cache

import numba
import numpy as np
import torch
from torch import Tensor

from varlen_kernels.cpu.int8_rows import FACTORS, kept_columns, quantize_row
from varlen_kernels.cpu.lanes import LANES
from varlen_kernels.cpu.stored_code import stored
from varlen_kernels.reference.linear_int8 import OUTLIERS, Int8Weight

# Lowest code of the signed form.
LOWEST_SIGNED = -128
# NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}


def pack_codes(codes: Tensor) -> Tensor:
    """Return the codes of a weight in the layout that `linear_int8_packed` reads.

    Args:
        codes: `[hidden, features]` int8.
    """
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes.t().contiguous(), None)
    return packed


def multiply_signed(x: Tensor, layer: Int8Weight, out: Tensor | None) -> Tensor:
    """Return `linear_int8` by `torch._int_mm`; codes are `[hidden, features]`."""
    row_codes, factors = quantize(x, layer.outliers, layer.levels, signed=True)
    return _dequantize(signed_sums(row_codes, layer.codes), factors, layer, out)


def multiply_packed(x: Tensor, layer: Int8Weight, out: Tensor | None) -> Tensor:
    """Return `linear_int8` by oneDNN's linear layer; `pack_codes` made the codes."""
    row_codes, factors = quantize(x, layer.outliers, layer.levels, signed=False)
    return _dequantize(unsigned_sums(row_codes, layer.codes), factors, layer, out)


def quantize(x: Tensor, outliers: Tensor, levels: int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes and factors of each token; see `reference.linear_int8.Int8Rows`.

    Args:
        x: `[tokens, hidden]` fp32, contiguous.
        outliers: `[OUTLIERS]` int64, ascending columns whose codes have no meaning.
        levels: largest code.
        signed: whether codes are int8 and begin at -128; else they are uint8 and begin at 0.

    Returns:
        `[tokens, hidden]`, and `[tokens, FACTORS]` fp32: the value of a step, the value of code 0, the outliers.

    Raises:
        ValueError: there is another number of outliers.
    """
    if len(outliers) != OUTLIERS:
        raise ValueError(f"outliers has {len(outliers)} columns; it must have {OUTLIERS}")
    # a row is written in whole vectors, which end in the next row, or after the last one
    memory = torch.empty(x.numel() + LANES, dtype=torch.uint8)
    codes = memory[: x.numel()].view(x.shape)
    factors = torch.empty(len(x), FACTORS)
    _quantize_rows(
        x.numpy(),
        outliers.numpy(),
        levels,
        LOWEST_SIGNED if signed else 0,
        codes.numpy(),
        factors.numpy(),
    )
    return codes.view(torch.int8) if signed else codes, factors


def _dequantize(sums: Tensor, factors: Tensor, layer: Int8Weight, out: Tensor | None) -> Tensor:
    """Return the values of sums of codes, `[tokens, features]` fp32."""
    if out is None:
        out = torch.empty(sums.shape)
    dequantize = _dequantize_integers if sums.dtype == torch.int32 else _dequantize_rows
    dequantize(*(each.numpy() for each in (sums, factors, layer.scale, layer.fp32_rows, out)))
    return out


@stored()
def _quantize_rows(
    x,  # [tokens, hidden]
    outliers,  # [OUTLIERS], ascending
    levels,
    lowest,  # the code of a token's lowest value
    codes,  # [tokens, hidden]
    factors,  # [tokens, FACTORS]
):
    """Write codes and factors."""
    kept = kept_columns(outliers, x.shape[1])
    for token in range(len(x)):
        quantize_row(x, token, outliers, kept, levels, lowest, codes, factors, token)


@stored()
def _dequantize_rows(
    sums,  # [tokens, features] fp32
    factors,  # [tokens, FACTORS]
    scale,  # [features]
    fp32_rows,  # [2 + OUTLIERS, features]
    out,  # [tokens, features]
):
    _dequantize_any(sums, factors, scale, fp32_rows, out)


# not a second signature of the function above: numba stores both in one index
@stored()
def _dequantize_integers(
    sums,  # [tokens, features] int32
    factors,  # [tokens, FACTORS]
    scale,  # [features]
    fp32_rows,  # [2 + OUTLIERS, features]
    out,  # [tokens, features]
):
    _dequantize_any(sums, factors, scale, fp32_rows, out)


@numba.njit(forceinline=True, fastmath=_FAST)
def _dequantize_any(
    sums,  # [tokens, features] int32 or fp32
    factors,  # [tokens, FACTORS]
    scale,  # [features]
    fp32_rows,  # [2 + OUTLIERS, features]
    out,  # [tokens, features]
):
    tokens, features = sums.shape
    weight_sums, bias = fp32_rows[0], fp32_rows[1]
    # one name for each of OUTLIERS
    first, second, third, fourth = fp32_rows[2], fp32_rows[3], fp32_rows[4], fp32_rows[5]
    for token in range(tokens):
        row_sums, row, row_factors = sums[token], out[token], factors[token]
        step, offset = row_factors[0], row_factors[1]
        x_first, x_second, x_third, x_fourth = (
            row_factors[2],
            row_factors[3],
            row_factors[4],
            row_factors[5],
        )
        for i in range(features):
            row[i] = (
                np.float32(row_sums[i]) * step * scale[i]
                + offset * weight_sums[i]
                + bias[i]
                + x_first * first[i]
                + x_second * second[i]
                + x_third * third[i]
                + x_fourth * fourth[i]
            )


def signed_sums(row_codes: Tensor, codes: Tensor) -> Tensor:
    """Return the products of int8 codes, `[tokens, features]` int32."""
    return torch._int_mm(row_codes, codes)


def unsigned_sums(row_codes: Tensor, packed: Tensor) -> Tensor:
    """Return the products of uint8 codes and packed ones, `[tokens, features]` fp32."""
    features = packed.shape[1]
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        row_codes,
        1.0,
        0,
        packed,
        _ones(features),
        _zeros(features),
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return sums


@lru_cache
def _ones(size: int) -> Tensor:
    return torch.ones(size)


@lru_cache
def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32)
