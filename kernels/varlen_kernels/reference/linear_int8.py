"""Linear layers in int8, in plain torch: the specification of `linear_int8`.

Weights have one scale per output feature and are symmetric around 0. Each token has a scale and an offset of its own,
so its answer never depends on other tokens. A few columns of the input, the outliers, are much larger than the others
and would take most of the codes; they are multiplied in fp32.
Source: columns in higher precision, Dettmers et al. 2022, arXiv:2208.07339; a scale per token, Yao et al. 2022,
arXiv:2206.01861. docs/operating/int8.md has measurements.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels import Activation, reference

# Columns of the input that are multiplied in fp32.
OUTLIERS = 4
# Steps between the lowest and the highest value of a token: 8 bits, or 7 where sums of 8 bits saturate.
FULL_LEVELS = 255
REDUCED_LEVELS = 127

# of a weight, and its negative the smallest
LARGEST_CODE = 127
# Keeps the inverse finite for tokens whose values are all equal.
SMALLEST_SCALE = 1e-30


class Int8Weight(NamedTuple):
    """A linear layer's weight and bias for `linear_int8`.

    Attributes:
        codes: `[hidden, features]` int8, from -127 to 127, 0 in the rows of outliers. Columns are contiguous: products
            of codes read both factors along `hidden`.
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


def weight_scale(weight: Tensor, outliers: Tensor) -> Tensor:
    """Return the value of one step of a code, `[features]` fp32.

    The largest weight of a feature is `LARGEST_CODE` steps.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, rows of the weight that get no codes.
    """
    largest = weight.index_fill(0, outliers, 0).abs().amax(0)
    return (largest / LARGEST_CODE).clamp_min(SMALLEST_SCALE)


def nearest_codes(weight: Tensor, outliers: Tensor) -> Tensor:
    """Return the codes of a weight that are nearest to it, `[hidden, features]` int8.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, rows of the weight that get code 0.
    """
    codes = (weight / weight_scale(weight, outliers)).round_()
    return codes.index_fill_(0, outliers, 0).to(torch.int8)


def quantize_weight(
    weight: Tensor,
    bias: Tensor | None,
    outliers: Tensor,
    levels: int,
    codes: Tensor | None = None,
) -> Int8Weight:
    """Return a weight and a bias in the form that `linear_int8` takes.

    Args:
        weight: `[hidden, features]` fp32, as `reference.linear` takes it.
        bias: `[features]` fp32.
        outliers: `[OUTLIERS]` int64, ascending columns of the input.
        levels: largest code of a token.
        codes: `[hidden, features]` int8, the weight in steps of `weight_scale`, 0 in the rows of outliers; the nearest
            codes if None.
    """
    scale = weight_scale(weight, outliers)
    codes = nearest_codes(weight, outliers) if codes is None else codes
    codes = codes.t().contiguous().t()
    sums = codes.sum(0, dtype=torch.int32) * scale
    bias = torch.zeros_like(sums) if bias is None else bias
    fp32_rows = torch.cat([sums[None], bias[None], weight[outliers]])
    return Int8Weight(codes, scale, fp32_rows, outliers, levels)


def quantize_rows(x: Tensor, outliers: Tensor, levels: int) -> Int8Rows:
    """Return the codes of each token.

    Args:
        x: `[tokens, hidden]` fp32.
        outliers: `[OUTLIERS]` int64, columns that get no codes.
        levels: largest code.
    """
    kept = torch.ones(x.shape[1], dtype=torch.bool).index_fill(0, outliers, value=False)
    low, high = (x[:, kept].amin(1, keepdim=True), x[:, kept].amax(1, keepdim=True))
    scale = ((high - low) / levels).clamp_min(SMALLEST_SCALE)
    # the value plus a half is never negative, so it is rounded by truncation
    finite = x.isfinite().all(1, keepdim=True)
    codes = ((x - low) * (1 / scale) + 0.5).masked_fill(~(kept & finite), 0).to(torch.int32)
    scale = scale.masked_fill(~finite, torch.nan)
    return Int8Rows(codes, scale, torch.cat([low, torch.ones_like(low), x[:, outliers]], 1))


def linear_int8(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return x @ weight + bias, `[tokens, features]` fp32, of a weight that `quantize_weight` made.

    The products of codes are summed in integers, without rounding and without saturation.

    Args:
        x: `[tokens, hidden]` fp32.
        layer: its weight and bias.
    """
    rows = quantize_rows(x, layer.outliers, layer.levels)
    # sums stay below 2**53, so float64 holds them exactly
    sums = (rows.codes.double() @ layer.codes.double()).float()
    result = sums * rows.scale * layer.scale + rows.factors @ layer.fp32_rows
    return result if out is None else out.copy_(result)


def linear_int8_activate(
    x: Tensor, layer: Int8Weight, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of `linear_int8`, see `reference.activate`."""
    return reference.activate(linear_int8(x, layer), kind=kind, out=out)
