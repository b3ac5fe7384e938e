"""The order of weights in panels, for products in fp32 and bf16 (`panels`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels.cpu.native.target_cpu import LANES, target_cpu

# Whether an instruction multiplies pairs of bf16 numbers and adds both products. Panels of bf16 hold pairs of hidden
# features side by side then.
HAS_PAIRS = target_cpu().has("avx512bf16")

# Rows of a tile, and vectors of a panel's row: 24 sums of the 32 registers of AVX-512, 12 of the 16 of AVX2.
TILE_ROWS = 6
PANEL_VECTORS = 4 if target_cpu().has("avx512f") else 1
PANEL_FEATURES = PANEL_VECTORS * LANES


class PanelWeight(NamedTuple):
    """The weight of a linear layer for `linear_panels`, or of its groups for `linear_groups_panels`.

    Attributes:
        panels: `[panels, hidden * PANEL_FEATURES]`.
        features: number of output features of a layer.
    """

    panels: Tensor
    features: int


def pack_panels(weight: Tensor) -> PanelWeight:
    """Return a weight, `[hidden, features]` fp32 or bf16, in the order in which products read it.

    The last panel is filled with zeros, and so is the last pair.
    """
    if HAS_PAIRS and weight.dtype == torch.bfloat16:
        return PanelWeight(_pairs(weight), weight.shape[1])
    hidden, features = weight.shape
    panels = -(-features // PANEL_FEATURES)
    packed = weight.new_zeros(panels, hidden, PANEL_FEATURES)
    whole = features // PANEL_FEATURES
    parts = weight[:, : whole * PANEL_FEATURES].view(hidden, whole, PANEL_FEATURES)
    packed[:whole] = parts.transpose(0, 1)
    packed[whole:, :, : features - whole * PANEL_FEATURES] = weight[:, whole * PANEL_FEATURES :]
    return PanelWeight(packed.view(panels, -1), features)


def pack_groups(weight: Tensor) -> PanelWeight:
    """Return the weights of groups, `[groups, features, hidden]`, as panels of one group after another."""
    packed = [pack_panels(each.t()).panels for each in weight]
    return PanelWeight(torch.cat(packed), weight.shape[1])


def _pairs(weight: Tensor) -> Tensor:
    """Return a bf16 weight in panels, with pairs of hidden features side by side."""
    hidden, features = weight.shape
    panels, pairs = -(-features // PANEL_FEATURES), -(-hidden // 2)
    padded = weight.new_zeros(2 * pairs, panels * PANEL_FEATURES)
    padded[:hidden, :features] = weight
    parts = padded.view(pairs, 2, panels, PANEL_FEATURES).permute(2, 0, 3, 1)
    return parts.reshape(panels, -1)
