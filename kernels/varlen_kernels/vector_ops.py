"""Ops around pooling that few models have: plain torch on every device.

Most are on the vectors of sequences, which are few.
"""

import torch
from torch import Tensor

__all__ = ["add", "add_scaled", "concat", "normalize_rows", "round_tanh"]

# Smallest divisor of torch.nn.functional.normalize, which sentence-transformers uses.
NORM_FLOOR = 1e-12
# The squares of a vector with a larger feature may overflow fp32. A power of two scales it first, which rounds nothing.
HUGE, SCALE_OF_HUGE = 2.0**50, 2.0**-80


def add(x: Tensor, residual: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x + residual, `[rows, features]`."""
    return torch.add(x, residual, out=out)


def add_scaled(
    x: Tensor, total: Tensor | None = None, *, factor: float, out: Tensor | None = None
) -> Tensor:
    """Return factor · x + total, `[rows, features]` fp32.

    Args:
        x: `[rows, features]`.
        total: `[rows, features]` fp32; None adds nothing.
    """
    if total is None:
        return torch.mul(x.float(), factor, out=out)
    return torch.add(total, x.float(), alpha=factor, out=out)


def concat(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the features of both for each row, `[rows, left + right]`."""
    return torch.cat((left, right), dim=1, out=out)


def normalize_rows(x: Tensor, normalize: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return each row divided by its length if `normalize` says so, `[rows, features]`.

    Args:
        x: `[rows, features]` fp32.
        normalize: `[rows]` bool.
    """
    peaks = torch.maximum(x.amax(1, keepdim=True), -x.amin(1, keepdim=True))
    scales = torch.where(normalize[:, None] & (peaks > HUGE), SCALE_OF_HUGE, 1.0)
    scaled = torch.mul(x, scales, out=out)
    lengths = torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_(min=NORM_FLOOR)
    return scaled.div_(torch.where(normalize[:, None], lengths, 1.0))


def round_tanh(x: Tensor, *, limit: float, out: Tensor | None = None) -> Tensor:
    """Return limit · tanh(x), rounded to whole numbers, `[rows, features]`.

    A number between -1/2 and 0 becomes -0, so the signs of `x` stay.

    Args:
        x: `[rows, features]` fp32.
    """
    return torch.tanh(x, out=out).mul_(limit).round_()
