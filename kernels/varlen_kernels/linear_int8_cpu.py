"""Linear layers in int8 on CPUs: products by oneDNN, quantization by numba.

Two products exist, and `choose_product` times both. `torch._int_mm` takes signed codes and is fastest where the CPU has
int8 instructions (VNNI, AMX); without them it may be a plain loop. The linear layer of oneDNN takes unsigned codes and
prepacked weights. Both may saturate on CPUs with AVX2 alone, which sum two products in 16 bits: then codes have 7 bits.
Source: the specification is `linear_int8_reference.linear_int8`; docs/int8.md has measurements.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen_kernels.attention_cpu import cache_folder
from varlen_kernels.compile_lock import compile_lock
from varlen_kernels.lanes_cpu import LANES, load, load_first, multiply_add, splat, sum_of
from varlen_kernels.linear_int8_reference import (
    FULL_LEVELS,
    OUTLIERS,
    REDUCED_LEVELS,
    SMALLEST_SCALE,
)

ProductKernel: TypeAlias = Literal["linear_int8", "linear_int8_packed"]
# Row codes to sums.
_Product: TypeAlias = Callable[[Tensor], Tensor]

# Lowest code of the signed form.
_SIGNED = -128
# Running minima and maxima: several vector registers, because each waits for the one before.
_LANES = 64
# NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
_SMALLEST_SCALE = np.float32(SMALLEST_SCALE)
_ZERO, _HALF, _NAN = np.float32(0), np.float32(0.5), np.float32(np.nan)
# Input and output features of products that are checked and timed; rows of the latter, and how often.
_WIDTH = 512
_TIMED_ROWS = 64
_TIMED_RUNS = 7
# Prepacked weights cost time for each new number of rows, so they must be this much faster.
_LEAST_GAIN = 1.15


@dataclass(frozen=True, slots=True)
class Int8Product:
    """The fastest product of codes on this CPU.

    Attributes:
        kernel: name of the op.
        levels: largest code of a token that never saturates.
    """

    kernel: ProductKernel
    levels: int


class NoInt8ProductError(RuntimeError):
    """Torch has no exact product of int8 codes on this CPU."""


@lru_cache(1)
def choose_product() -> Int8Product:
    """Return the fastest product, timed once per process, in a few milliseconds.

    Its ops are compiled too, which takes seconds if their code is not stored.

    Raises:
        NoInt8ProductError: no product is exact.
    """
    fastest: Int8Product | None = None
    least = math.inf
    candidates: list[tuple[ProductKernel, Callable[[Tensor], _Product], int, float]] = [
        ("linear_int8", _signed_product, _SIGNED, 1.0),
        ("linear_int8_packed", _packed_product, 0, _LEAST_GAIN),
    ]
    for kernel, product_of, lowest, least_gain in candidates:
        try:
            levels = _exact_levels(product_of, lowest)
            seconds = _seconds(product_of, lowest) * least_gain
        except (AttributeError, RuntimeError):
            # torch was built without this product
            continue
        if levels and seconds < least:
            fastest, least = Int8Product(kernel, levels), seconds
    if fastest is None:
        raise NoInt8ProductError(
            "torch multiplies int8 codes inexactly, or not at all, on this CPU"
        )
    _compile(signed=fastest.kernel == "linear_int8")
    return fastest


def _compile(*, signed: bool) -> None:
    """Compile the code of one product."""
    with compile_lock(cache_folder()):
        x, features = torch.zeros(1, OUTLIERS + 1), 1
        codes, scale, factors = quantize(x, torch.arange(OUTLIERS), 1, signed=signed)
        sums = codes[:, :features].to(torch.int32 if signed else torch.float32)
        fp32_rows = torch.zeros(2 + OUTLIERS, features)
        _dequantize(sums, scale, factors, torch.ones(features), fp32_rows, None)


def pack_codes(codes: Tensor) -> Tensor:
    """Return the codes of a weight in the layout that `linear_int8_packed` reads.

    Args:
        codes: `[hidden, features]` int8.
    """
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes.t().contiguous(), None)
    return packed


def multiply_signed(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    fp32_rows: Tensor,
    outliers: Tensor,
    levels: int,
    out: Tensor | None,
) -> Tensor:
    """Return `linear_int8` by `torch._int_mm`; `codes` is `[hidden, features]`."""
    row_codes, row_scale, factors = quantize(x, outliers, levels, signed=True)
    return _dequantize(_signed_sums(row_codes, codes), row_scale, factors, scale, fp32_rows, out)


def multiply_packed(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    fp32_rows: Tensor,
    outliers: Tensor,
    levels: int,
    out: Tensor | None,
) -> Tensor:
    """Return `linear_int8` by oneDNN's linear layer; `codes` is made by `pack_codes`."""
    row_codes, row_scale, factors = quantize(x, outliers, levels, signed=False)
    return _dequantize(_unsigned_sums(row_codes, codes), row_scale, factors, scale, fp32_rows, out)


def quantize(
    x: Tensor, outliers: Tensor, levels: int, *, signed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and factors of each token; see `linear_int8_reference.Int8Rows`.

    Args:
        x: `[tokens, hidden]` fp32, contiguous.
        outliers: `[OUTLIERS]` int64, ascending columns that get no codes.
        levels: largest code.
        signed: whether codes are int8 and begin at -128; else they are uint8 and begin at 0.

    Raises:
        ValueError: there is another number of outliers.
    """
    if len(outliers) != OUTLIERS:
        raise ValueError(f"outliers has {len(outliers)} columns; it must have {OUTLIERS}")
    rows = len(x)
    codes = torch.empty(x.shape, dtype=torch.int8 if signed else torch.uint8)
    scale, factors = torch.empty(rows), torch.empty(rows, 2 + OUTLIERS)
    _quantize_rows(
        x.numpy(),
        outliers.numpy(),
        levels,
        _SIGNED if signed else 0,
        codes.numpy(),
        scale.numpy(),
        factors.numpy(),
    )
    return codes, scale, factors


def _dequantize(
    sums: Tensor,
    row_scale: Tensor,
    factors: Tensor,
    scale: Tensor,
    fp32_rows: Tensor,
    out: Tensor | None,
) -> Tensor:
    """Return the values of sums of codes, `[tokens, features]` fp32."""
    if out is None:
        out = torch.empty(sums.shape)
    dequantize = _dequantize_integers if sums.dtype == torch.int32 else _dequantize_rows
    dequantize(*(each.numpy() for each in (sums, row_scale, factors, scale, fp32_rows, out)))
    return out


# else it gets the caller's, which assumes finite numbers
@numba.njit(forceinline=True, _nrt=False, fastmath=False)
def _is_finite(x, token):
    # zero times a number is zero, unless the number is NaN or infinite
    zero = splat(_ZERO)
    total = zero
    whole = x.shape[1] // LANES * LANES
    for column in range(0, whole, LANES):
        total = multiply_add(load(x, token, column), zero, total)
    if whole < x.shape[1]:
        rest = load_first(x, token, whole, x.shape[1] - whole)
        total = multiply_add(rest, zero, total)
    return sum_of(total) == _ZERO


# no contraction of products and sums: codes are those of the reference, bit by bit
@numba.njit(nogil=True, cache=True, fastmath={"nnan", "ninf", "nsz"})
def _quantize_rows(
    x,  # [tokens, hidden]
    outliers,  # [OUTLIERS], ascending
    levels,
    lowest,  # the code of a token's lowest value
    codes,  # [tokens, hidden]
    scales,  # [tokens]
    factors,  # [tokens, 2 + OUTLIERS]
):
    """Write codes, scales and factors; a token that is not finite gets NaN."""
    tokens, hidden = x.shape
    lows, highs = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    # a token without its outliers: in their places stands the value of another column
    row = np.empty(hidden, np.float32)
    other = 0
    for outlier in outliers:
        if outlier == other:
            other += 1
    whole = hidden - hidden % _LANES
    for token in range(tokens):
        source, row_codes, row_factors = x[token], codes[token], factors[token]
        for i in range(hidden):
            row[i] = source[i]
        low = high = source[other]
        for k in range(len(outliers)):
            row_factors[2 + k] = source[outliers[k]]
            row[outliers[k]] = low
        lows[:] = low
        highs[:] = high
        for begin in range(0, whole, _LANES):
            for lane in range(_LANES):
                value = row[begin + lane]
                lows[lane] = min(lows[lane], value)
                highs[lane] = max(highs[lane], value)
        for i in range(whole, hidden):
            low = min(low, row[i])
            high = max(high, row[i])
        for lane in range(_LANES):
            low = min(low, lows[lane])
            high = max(high, highs[lane])
        scale = max((high - low) / np.float32(levels), _SMALLEST_SCALE)
        inverse = np.float32(1.0) / scale
        for i in range(hidden):
            row_codes[i] = np.int32((row[i] - low) * inverse + _HALF) + lowest
        for outlier in outliers:
            row_codes[outlier] = 0
        scales[token] = scale
        row_factors[0] = low - scale * np.float32(lowest)
        row_factors[1] = np.float32(1.0)
        if not _is_finite(x, token):
            row_codes[:] = 0
            scales[token] = _NAN


@numba.njit(nogil=True, cache=True)
def _dequantize_rows(
    sums,  # [tokens, features] fp32
    row_scale,  # [tokens]
    factors,  # [tokens, 2 + OUTLIERS]
    scale,  # [features]
    fp32_rows,  # [2 + OUTLIERS, features]
    out,  # [tokens, features]
):
    _dequantize_any(sums, row_scale, factors, scale, fp32_rows, out)


# not a second signature of the function above: numba stores both in one index
@numba.njit(nogil=True, cache=True)
def _dequantize_integers(
    sums,  # [tokens, features] int32
    row_scale,  # [tokens]
    factors,  # [tokens, 2 + OUTLIERS]
    scale,  # [features]
    fp32_rows,  # [2 + OUTLIERS, features]
    out,  # [tokens, features]
):
    _dequantize_any(sums, row_scale, factors, scale, fp32_rows, out)


@numba.njit(forceinline=True, fastmath=_FAST)
def _dequantize_any(
    sums,  # [tokens, features] int32 or fp32
    row_scale,  # [tokens]
    factors,  # [tokens, 2 + OUTLIERS]
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
        step, offset = row_scale[token], row_factors[0]
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


def _signed_sums(row_codes: Tensor, codes: Tensor) -> Tensor:
    """Return the products of int8 codes, `[tokens, features]` int32."""
    return torch._int_mm(row_codes, codes)


def _unsigned_sums(row_codes: Tensor, packed: Tensor) -> Tensor:
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


def _signed_product(codes: Tensor) -> _Product:
    return lambda row_codes: _signed_sums(row_codes, codes)


def _packed_product(codes: Tensor) -> _Product:
    packed = pack_codes(codes)
    return lambda row_codes: _unsigned_sums(row_codes, packed)


def _exact_levels(product_of: Callable[[Tensor], _Product], lowest: int) -> int:
    """Return the largest number of levels whose sums are exact, or 0.

    Args:
        product_of: makes a product of a weight's codes, `[hidden, features]` int8.
        lowest: the lowest row code.
    """
    codes = torch.tensor([[127], [-127]], dtype=torch.int8).repeat(_WIDTH // 2, _WIDTH)
    product = product_of(codes.t())
    for levels in (FULL_LEVELS, REDUCED_LEVELS):
        # sums are extreme where every code is at an end of its range
        rows = torch.tensor([[lowest + levels], [lowest]]).repeat(_TIMED_ROWS // 2, _WIDTH)
        exact = rows.double() @ codes.t().double()
        # one row may take another path than many
        if all(
            torch.equal(product(_typed(rows[:count], lowest)).double(), exact[:count])
            for count in (1, _TIMED_ROWS)
        ):
            return levels
    return 0


def _seconds(product_of: Callable[[Tensor], _Product], lowest: int) -> float:
    """Return the shortest time of a few products, after one that compiles."""
    product = product_of(torch.ones(_WIDTH, _WIDTH, dtype=torch.int8).t())
    rows = _typed(torch.ones(_TIMED_ROWS, _WIDTH), lowest)
    product(rows)
    times: npt.NDArray[np.float64] = np.empty(_TIMED_RUNS)
    for run in range(_TIMED_RUNS):
        began = time.perf_counter()
        product(rows)
        times[run] = time.perf_counter() - began
    return float(times.min())


def _typed(row_codes: Tensor, lowest: int) -> Tensor:
    """Return row codes in the dtype that begins at `lowest`."""
    return row_codes.to(torch.int8 if lowest else torch.uint8).contiguous()
