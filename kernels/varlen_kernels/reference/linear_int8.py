"""Linear layers in int8, in plain torch: the specification of `linear_int8`.

Weights have one scale per output feature and are symmetric around 0; their codes have 8 or 4 bits. Each token has a
scale and an offset of its own, so its answer never depends on other tokens. A few columns of the input, the outliers,
are much larger than the others and would take most of the codes; they are multiplied in fp32.
Source: columns in higher precision, Dettmers et al. 2022, arXiv:2208.07339; a scale per token, Yao et al. 2022,
arXiv:2206.01861. docs/operating/int8.md has measurements.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels import Activation, reference

# Columns of the input that are multiplied in fp32.
OUTLIERS = 4
# Numbers of a token beside its codes: the value of a step, the value of code 0, the outliers.
FACTORS = 2 + OUTLIERS
# Steps between the lowest and the highest value of a token: 8 bits, or 7 where sums of 8 bits saturate.
FULL_LEVELS = 255
REDUCED_LEVELS = 127

# Keeps the inverse finite for tokens whose values are all equal.
SMALLEST_SCALE = 1e-30


class WeightCodes(NamedTuple):
    """The codes of a weight.

    Attributes:
        scale: `[features]` fp32, the value of one step of a code.
        codes: `[hidden, features]` int8, 0 in the rows of outliers.
    """

    scale: Tensor
    codes: Tensor


class Int8Weight(NamedTuple):
    """A linear layer's weight and bias for `linear_int8`.

    Attributes:
        codes: `[hidden, features]` int8, 0 in the rows of outliers. Columns are contiguous: products of codes read both
            factors along `hidden`.
        scale: `[features]` fp32, the value of one step of a code.
        fp32_rows: `[2 + OUTLIERS, features]` fp32: the sum of the weights that the codes stand for, the bias, and the
            weights of each outlier.
        outliers: `[OUTLIERS]` int64, columns of the input.
        levels: largest code of a token.
    """

    codes: Tensor
    scale: Tensor
    fp32_rows: Tensor
    outliers: Tensor
    levels: int


class Int8Rows(NamedTuple):
    """The input of a linear layer as codes.

    Attributes:
        codes: `[tokens, hidden]` int32, from 0 to the number of levels; 0 in the columns of outliers.
        scale: `[tokens, 1]` fp32, the value of one step of a code; NaN if a number of the token is not finite, whose
            codes are 0.
        factors: `[tokens, 2 + OUTLIERS]` fp32, what the `fp32_rows` are multiplied by: the value of code 0, 1, and
            the outliers.
    """

    codes: Tensor
    scale: Tensor
    factors: Tensor


def largest_code(bits: int) -> int:
    """Return the largest code of a weight; its negative is the smallest."""
    return int(2 ** (bits - 1)) - 1


def nearest_scale(weight: Tensor, outliers: Tensor, bits: int) -> Tensor:
    """Return the scale of `nearest_codes`."""
    largest = weight.index_fill(0, outliers, 0).abs_().amax(0)
    return (largest / largest_code(bits)).clamp_min_(SMALLEST_SCALE)


def nearest_codes(weight: Tensor, outliers: Tensor, bits: int = 8) -> WeightCodes:
    """Return the codes that are nearest to a weight.

    The largest weight of a feature has the largest code.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, rows of the weight that get code 0.
        bits: 8 or 4.
    """
    scale = nearest_scale(weight, outliers, bits)
    codes = (weight / scale).round_().index_fill_(0, outliers, 0)
    return WeightCodes(scale, codes.to(torch.int8))


def quantize_weight(
    weight: Tensor,
    bias: Tensor | None,
    outliers: Tensor,
    levels: int,
    chosen: WeightCodes | None = None,
) -> Int8Weight:
    """Return a weight and a bias in the form that `linear_int8` takes.

    Args:
        weight: `[hidden, features]` fp32, as `reference.linear` takes it.
        bias: `[features]` fp32.
        outliers: `[OUTLIERS]` int64, ascending columns of the input.
        levels: largest code of a token.
        chosen: codes of the weight; the nearest ones of 8 bits if None.
    """
    scale, codes = nearest_codes(weight, outliers) if chosen is None else chosen
    codes = codes.t().contiguous().t()
    sums = codes.sum(0, dtype=torch.int32) * scale
    bias = torch.zeros_like(sums) if bias is None else bias
    fp32_rows = torch.cat([sums[None], bias[None], weight[outliers]])
    return Int8Weight(codes, scale, fp32_rows, outliers, levels)


def quantize_rows(x: Tensor, outliers: Tensor, levels: int) -> Int8Rows:
    """Return the codes of each token.

    Args:
        x: `[tokens, hidden]`, computed in fp32.
        outliers: `[OUTLIERS]` int64, columns that get no codes.
        levels: largest code.
    """
    x = x.float()
    kept = torch.ones(x.shape[1], dtype=torch.bool).index_fill(0, outliers, value=False)
    low, high = (x[:, kept].amin(1, keepdim=True), x[:, kept].amax(1, keepdim=True))
    scale = ((high - low) / levels).clamp_min(SMALLEST_SCALE)
    # the value plus a half is never negative, so it is rounded by truncation
    finite = x.isfinite().all(1, keepdim=True)
    # float64 holds the product, so the sum is rounded once
    codes = ((x - low).double() * (1 / scale).double() + 0.5).float()
    codes = codes.masked_fill(~(kept & finite), 0).to(torch.int32)
    scale = scale.masked_fill(~finite, torch.nan)
    return Int8Rows(codes, scale, torch.cat([low, torch.ones_like(low), x[:, outliers]], 1))


def linear_int8(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return x @ weight + bias, `[tokens, features]`, of a weight that `quantize_weight` made.

    The products of codes are summed in integers, without rounding and without saturation. The rest is in fp32, and
    results are rounded once.

    Args:
        x: `[tokens, hidden]` fp32 or bf16.
    """
    rows = quantize_rows(x, layer.outliers, layer.levels)
    # sums stay below 2**53, so float64 holds them exactly
    sums = (rows.codes.double() @ layer.codes.double()).float()
    result = sums * rows.scale * layer.scale + rows.factors @ layer.fp32_rows
    return result.to(x.dtype) if out is None else out.copy_(result)


def linear_int8_activate(
    x: Tensor, layer: Int8Weight, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of `linear_int8` of fp32, see `reference.activate`."""
    result = reference.activate(linear_int8(x.float(), layer), kind=kind)
    return result.to(x.dtype) if out is None else out.copy_(result)
