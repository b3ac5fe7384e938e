"""Rotary positions, and the table of them: cosines and sines of every position's angles.

Source: Su et al. 2021, arXiv:2104.09864; Peng et al. 2023, arXiv:2309.00071 (YaRN). Frequencies are computed in
fp32 in the order of transformers, so that far positions get the same angles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.checkpoint.rotary_config import (
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    YarnScaling,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Rotary positions of queries and keys, and the norms before them.

    Attributes:
        cos_sin: `[positions, head_dim]` fp32, result of `rotary_table`.
        norms: `[head_dim]`, weights of the RMS norms of queries and of keys; None for no norms.
        norm_eps: added to the mean square.
    """

    cos_sin: Tensor
    norms: tuple[Tensor, Tensor] | None
    norm_eps: float


def rotary_table(rotary: RotaryConfig, dim: int, device: torch.device) -> Tensor:
    """Return cosines, then sines, of all positions: `[positions, dim]` fp32."""
    import torch

    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies, scale = _scaled(rotary, rotary.theta**exponents, dim)
    positions = torch.arange(rotary.positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * scale).to(device)


def _scaled(rotary: RotaryConfig, periods: Tensor, dim: int) -> tuple[Tensor, float]:
    """Return the frequencies, given their inverses, and the factor of cosines and sines."""
    match rotary.scaling:
        case LinearScaling(factor=factor):
            return 1.0 / periods / factor, 1.0
        case Llama3Scaling() as llama3:
            return _llama3(llama3, 1.0 / periods), 1.0
        case YarnScaling() as yarn:
            return _yarn(yarn, periods, rotary.theta, dim), _yarn_attention_factor(yarn)


def _llama3(scaling: Llama3Scaling, frequencies: Tensor) -> Tensor:
    rotations = scaling.positions / (2 * math.pi / frequencies)
    # 0 for low frequencies, 1 for high ones
    ramp = ((rotations - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def _yarn(scaling: YarnScaling, periods: Tensor, theta: float, dim: int) -> Tensor:
    import torch

    def feature_at(rotations: float) -> float:
        """Return the feature that rotates `rotations` times over the original length."""
        return dim * math.log(scaling.positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = feature_at(scaling.beta_fast), feature_at(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    # 1 for high frequencies, 0 for low ones
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
