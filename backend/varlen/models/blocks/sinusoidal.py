"""Sinusoidal positions: one table entry per position, from angles and not from training.

Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5; the orders of features follow transformers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def marian_positions(positions: int, hidden: int) -> Tensor:
    """Return Marian's table, `[positions, hidden]` fp32: sines of all angles, then cosines."""
    import torch

    feature = torch.arange(0, hidden, 2, dtype=torch.float64)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (feature / hidden)
    # an odd number of features has one cosine less
    return torch.cat([angles.sin(), angles.cos()[:, : hidden // 2]], dim=1).float()


def m2m_positions(positions: int, hidden: int, *, first: int) -> Tensor:
    """Return the table of M2M-100, `[positions, hidden]` fp32: sines of all angles, then cosines.

    Args:
        hidden: features of a token, at least 4; a last odd one is 0.
    """
    import torch

    half = hidden // 2
    # fp32 throughout, as transformers computes them
    steps = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(first, first + positions).float()[:, None] * steps
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(table, (0, hidden % 2))
