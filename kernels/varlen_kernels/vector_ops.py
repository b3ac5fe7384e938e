"""Ops on the vectors of sequences, which are few: plain torch on every device.

They follow pooling where a vector is more than one pooled row.
"""

import torch
from torch import Tensor

# Smallest divisor of torch.nn.functional.normalize, which sentence-transformers uses.
NORM_FLOOR = 1e-12


def concat(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the features of both for each row, `[rows, left + right]`.

    Args:
        left, right: `[rows, features]`, of one dtype.
    """
    return torch.cat((left, right), dim=1, out=out)


def normalize_rows(x: Tensor, normalize: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return each row divided by its length if `normalize` says so, `[rows, features]`.

    Args:
        x: `[rows, features]` fp32.
        normalize: `[rows]` bool.
    """
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_(min=NORM_FLOOR)
    divisors = torch.where(normalize[:, None], lengths, 1.0)
    return torch.div(x, divisors, out=out)
