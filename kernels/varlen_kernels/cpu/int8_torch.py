"""Linear layers in int8 on CPUs: products by torch, conversions by numba.

`torch._int_mm` takes signed codes and is fast where the CPU has int8 instructions (VNNI, AMX); without them it may be a
plain loop. The linear layer of oneDNN takes unsigned codes and prepacked weights. Both may saturate on CPUs with only
AVX2, which sum two products in 16 bits: then codes have 7 bits.
Source: the specification is `reference.linear_int8.linear_int8`; docs/operating/int8.md has measurements.
"""

from functools import lru_cache

import torch
from torch import Tensor

from varlen_kernels.cpu.calls.calls import run_function
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.functions import DEQUANTIZE, DEQUANTIZE_INT32, QUANTIZE
from varlen_kernels.reference.linear_int8 import FACTORS, OUTLIERS, Int8Weight

# Lowest code of the signed form.
LOWEST_SIGNED = -128


def pack_codes(codes: Tensor) -> Tensor:
    """Return the codes of a weight in the layout that `linear_int8_packed` reads.

    Args:
        codes: `[hidden, features]` int8.
    """
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes.t().contiguous(), None)
    return packed


def linear_int8(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return `reference.linear_int8` by `torch._int_mm`; codes are `[hidden, features]`."""
    row_codes, factors = quantize(x, layer.outliers, layer.levels, signed=True)
    return _dequantize(signed_sums(row_codes, layer.codes), factors, layer, out)


def linear_int8_packed(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
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
    lowest = LOWEST_SIGNED if signed else 0
    run_function(QUANTIZE, (x, outliers, codes, factors), (levels, lowest))
    return codes.view(torch.int8) if signed else codes, factors


def _dequantize(sums: Tensor, factors: Tensor, layer: Int8Weight, out: Tensor | None) -> Tensor:
    """Return the values of sums of codes, `[tokens, features]` fp32."""
    if out is None:
        out = torch.empty(sums.shape)
    function = DEQUANTIZE_INT32 if sums.dtype == torch.int32 else DEQUANTIZE
    run_function(function, (sums, factors, layer.scale, layer.fp32_rows, out))
    return out


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
