"""Codes of a weight whose errors cancel out on the inputs that its layer has.

The nearest codes make the smallest error of each weight. The error of a layer's output is smaller if later columns
correct the error of earlier ones, which they can where the inputs of both go together.
Source: LDLQ, Chee et al. 2023, arXiv:2307.13304, section 3; the same codes as GPTQ, Frantar et al. 2022,
arXiv:2210.17323, without an inverse. Columns with large inputs come first, as with GPTQ's `act_order`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from varlen.execution.int8.quantization import WeightBits
from varlen_kernels.reference.linear_int8 import (
    SMALLEST_SCALE,
    WeightCodes,
    largest_code,
    nearest_codes,
)

# Part of the mean of the gram matrix's diagonal, added to the diagonal: inputs of calibration are a sample.
_DAMPING = 0.01
# Fewer columns of the input are corrected one by one, and halves of more in one product.
_BLOCK = 16
# Output features at a time, which bounds the memory.
_FEATURES = 4096
# Candidates for the scale of codes of 4 bits, by the scale of the nearest codes: smaller ones cut the largest weights.
_SCALES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)

# The difference of a widened weight from a scale times its code, by the largest weight: a few roundings of fp32.
_ROUNDINGS = 2.0**-21
# Columns of the input by which most other weights are told.
_SAMPLE = 64


def rounded_codes(
    weight: Tensor, outliers: Tensor, grams: Sequence[Tensor], bits: WeightBits = 8
) -> WeightCodes:
    """Return codes for `quantize_weight`.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, columns of the input that get no codes.
        grams: sums over tokens of the products of two columns of the input: a matrix for each part of the columns,
            whose errors are corrected together. Columns whose sums are not finite get the nearest codes.
    """
    is_kept = torch.ones(len(weight), dtype=torch.bool).index_fill(0, outliers, value=False)
    scale, codes = nearest_codes(weight, outliers, bits)
    if bits == 4:
        # too few for the largest weights of a feature and for the others
        sizes = torch.cat([gram.diagonal() for gram in grams]) * is_kept
        for part in _features(weight):
            scale[part] = _best_scale(weight[:, part], scale[part], sizes, bits)
    first = 0
    for gram in grams:
        columns = is_kept[first : first + len(gram)].nonzero()[:, 0]
        columns = columns[gram.diagonal()[columns].argsort(descending=True)]
        feedback = _feedback(gram, columns)
        if feedback is not None:
            columns += first
            for part in _features(weight):
                codes[columns, part] = _codes(weight[columns, part], scale[part], feedback, bits)
        first += len(gram)
    return WeightCodes(scale, codes)


def stored_codes(weight: Tensor, outliers: Tensor, bits: WeightBits = 8) -> WeightCodes | None:
    """Return the codes that a weight was widened from; None for other weights.

    A quantized checkpoint with a scale for each output and no zero points has them: each feature is a scale times whole
    numbers, and the largest number uses all bits, or nearly all.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, columns of the input that get code 0.
    """
    most, largest = largest_code(bits), weight.abs().amax(0).clamp_min(SMALLEST_SCALE)
    candidates = torch.stack([largest / code for code in (most + 1, most, most - 1)])
    # a part tells at once that most weights are none
    some = weight[:_SAMPLE]
    differences = [((some / each).round_() * each - some).abs().amax(0) for each in candidates]
    difference, best = torch.stack(differences).min(0)
    if (difference > _ROUNDINGS * largest).any():
        return None
    scale = candidates.gather(0, best[None])[0]
    codes = torch.empty_like(weight, dtype=torch.int8)
    for part in _features(weight):
        found = (weight[:, part] / scale[part]).round_()
        lost = (found * scale[part] - weight[:, part]).abs_()
        if found.max() > most or (lost > _ROUNDINGS * largest[part]).any():
            return None
        codes[:, part] = found.to(torch.int8)
    return WeightCodes(scale, codes.index_fill_(0, outliers, 0))


def _features(weight: Tensor) -> Iterator[slice]:
    for first in range(0, weight.shape[1], _FEATURES):
        yield slice(first, first + _FEATURES)


def _best_scale(weight: Tensor, scale: Tensor, sizes: Tensor, bits: WeightBits) -> Tensor:
    """Return the scale of each feature whose nearest codes have the smallest error.

    Args:
        weight: `[hidden, features]` fp32.
        scale: `[features]` fp32.
        sizes: `[hidden]`, mean squares of the columns of the input, in any unit.
    """
    largest = largest_code(bits)
    candidates = [scale * factor for factor in _SCALES]
    errors = [
        sizes @ ((weight / each).round_().clamp_(-largest, largest) * each - weight).square_()
        for each in candidates
    ]
    best = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(candidates).gather(0, best)[0]


def _feedback(gram: Tensor, columns: Tensor) -> Tensor | None:
    """Return the share of a column's error that each later column corrects.

    The gram matrix is U D U' with a diagonal D and this upper triangle U, whose diagonal is 1.

    Args:
        columns: order of its columns.

    Returns:
        `[columns, columns]` fp32; None if the gram matrix is not finite.
    """
    mean = gram.diagonal()[columns].double().mean()
    # from the last column to the first, the lower triangle becomes the upper one
    backwards = columns.flip(0)
    gram = gram[backwards][:, backwards].double()
    gram.diagonal().add_(_DAMPING * mean + torch.finfo(torch.float32).tiny)
    lower, failed = torch.linalg.cholesky_ex(gram)
    return None if failed else lower.div_(lower.diagonal().clone()).float().flip(0, 1)


def _codes(weight: Tensor, scale: Tensor, feedback: Tensor, bits: WeightBits) -> Tensor:
    """Return the codes of a weight, column of the input by column.

    Args:
        weight: `[hidden, features]` fp32.
        scale: `[features]` fp32.
        feedback: `[hidden, hidden]` fp32.
    """
    exact = weight / scale
    codes = torch.empty_like(exact)
    _choose(exact.clone(), exact, codes, feedback, largest_code(bits))
    return codes.to(torch.int8)


def _choose(goals: Tensor, exact: Tensor, codes: Tensor, feedback: Tensor, largest: int) -> None:
    """Choose codes of columns; each goal becomes the error of its code.

    Args:
        goals, exact: `[hidden, features]` fp32, in steps of a code.
    """
    half = len(goals) // 2
    if half >= _BLOCK:
        _choose(goals[:half], exact[:half], codes[:half], feedback[:half, :half], largest)
        goals[half:].addmm_(feedback[:half, half:].t(), goals[:half])
        _choose(goals[half:], exact[half:], codes[half:], feedback[half:, half:], largest)
        return
    rows = zip(goals, exact, codes, feedback, strict=True)
    # results go where they stay: a call of torch takes as long as its work
    for after, (goal, weight, code, shares) in enumerate(rows, 1):
        torch.round(goal, out=code).clamp_(-largest, largest)
        torch.sub(weight, code, out=goal)
        goals[after:].addr_(shares[after:], goal)
