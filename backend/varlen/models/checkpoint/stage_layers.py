"""The layers of one stage of a pipeline, while a model is read.

Every stage reads the whole model, but of other stages' layers only the shapes: their weights are tensors of the device
`meta`, which have no memory. So each one records the same ops, and all find the same cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class StageLayers:
    """The layers of one stage."""

    def __init__(self, first: int = 0, last: int = 0, *, is_first: bool = False) -> None:
        """Choose the layers.

        Args:
            first, last: bounds of the layers; equal to read none.
        """
        self.is_first = is_first
        self.count = 0
        self._bounds = first, last
        self.layer_of: dict[int, int] = {}
        # as long as they are kept, no other tensor has their id
        self._weights: list[Tensor] = []

    def has(self, number: int) -> bool:
        first, last = self._bounds
        return first <= number < last

    def add(self, layers: Sequence[object]) -> None:
        """Take notice of all layers, which were read."""
        self.count = len(layers)
        for number, layer in enumerate(layers):
            for weight in _weights(layer):
                self.layer_of[id(weight)] = number
                self._weights.append(weight)


def _weights(part: object) -> Iterator[Tensor]:
    from torch import Tensor

    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _weights(each)
    elif is_dataclass(part):
        for each in fields(part):
            yield from _weights(getattr(part, each.name))
