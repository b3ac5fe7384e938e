"""The order of weights and codes in panels, for `panels` and `block_panels`."""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels.cpu.native.target_cpu import LANES, target_cpu

# Whether an instruction multiplies pairs of bf16 numbers and adds both products. Panels of bf16 hold pairs of hidden
# features side by side then.
HAS_PAIRS = target_cpu().has("avx512bf16")
# Whether an instruction looks 16 numbers up in a table. Without it codes are whole numbers.
HAS_TABLES = target_cpu().has("avx512f")

# Rows of a tile, and vectors of a panel's row: 24 sums of the 32 registers of AVX-512, 12 of the 16 of AVX2.
TILE_ROWS = 6
PANEL_VECTORS = 4 if HAS_TABLES else 1
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


class BlockWeight(NamedTuple):
    """The weight of a linear layer for `linear_blocks`: value of a code · scale + offset.

    A block is some neighbouring inputs of a feature, which share both.

    Attributes:
        panels: `[panels, hidden · bits / 32 · PANEL_FEATURES]` int32, words of codes.
        scales: `[panels, blocks · PANEL_FEATURES]` fp32; with offsets twice as many columns: the scales of a block,
            then its offsets.
        features: number of output features.
        size: inputs of a block.
        bits: width of a code, 4 or 8. Codes of 8 bits are whole numbers with a sign.
        table: `[1, 16]` fp32, the values of codes of 4 bits.
        order: `[hidden]` int32, the places of the inputs; None where they are in order.
    """

    panels: Tensor
    scales: Tensor
    features: int
    size: int
    bits: int
    table: Tensor
    order: Tensor | None


def shift_of(column: int, bits: int) -> int:
    """Return the lowest bit of a code in its word.

    One half has the even inputs, the other one the odd ones, so that pairs are side by side.
    """
    return column // 2 * bits + column % 2 * 16


def pack_blocks(
    codes: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bits: int = 4,
    table: Tensor | None = None,
    order: Tensor | None = None,
) -> BlockWeight:
    """Return codes in the order in which products read them.

    Args:
        codes: `[features, hidden]` uint8; a block has a multiple of 16 inputs.
        scale: `[features, blocks]` fp32.
        offset: value of the middle code, 8 or 128, of the same shape; None for 0.
        table: `[16]` fp32, the values of codes, which need `HAS_TABLES`; None for the distance from the middle code.
    """
    features, hidden = codes.shape
    panels, blocks, inputs = -(-features // PANEL_FEATURES), scale.shape[1], 32 // bits
    if table is None:
        codes = codes ^ 1 << bits - 1
        table = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32)
    words = torch.zeros(hidden // inputs, panels * PANEL_FEATURES, dtype=torch.int32)
    for column in range(inputs):
        words[:, :features] |= codes[:, column::inputs].t().int() << shift_of(column, bits)
    parts = [scale] if offset is None else [scale, offset]
    numbers = torch.zeros(blocks, len(parts), panels * PANEL_FEATURES)
    for i, part in enumerate(parts):
        numbers[:, i, :features] = part.t()

    def in_panels(rows: Tensor) -> Tensor:
        return rows.view(-1, panels, PANEL_FEATURES).transpose(0, 1).reshape(panels, -1)

    size, places = hidden // blocks, None if order is None else order.int()
    packed = in_panels(words), in_panels(numbers)
    return BlockWeight(*packed, features, size, bits, table.view(1, -1), places)


def _pairs(weight: Tensor) -> Tensor:
    """Return a bf16 weight in panels, with pairs of hidden features side by side."""
    hidden, features = weight.shape
    panels, pairs = -(-features // PANEL_FEATURES), -(-hidden // 2)
    padded = weight.new_zeros(2 * pairs, panels * PANEL_FEATURES)
    padded[:hidden, :features] = weight
    parts = padded.view(pairs, 2, panels, PANEL_FEATURES).permute(2, 0, 3, 1)
    return parts.reshape(panels, -1)
