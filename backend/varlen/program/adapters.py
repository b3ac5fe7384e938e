"""Low-rank adapters in a program: the layers that have them, and their tables.

A batch brings the rows that have an adapter, sorted by it. One op adds to a layer what the factors of the adapters
give, which stand in slots of tables; a loader writes them between batches.
Source: Hu et al. 2021, arXiv:2106.09685 (LoRA); Chen et al. 2023, arXiv:2310.18547 (one grouped product for a batch of
many adapters); Sheng et al. 2023, arXiv:2311.03285 (adapters that take turns in bounded memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from varlen_kernels.functions import RANK_STEP, WIDTH_STEP

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.program.program import State

Bounds: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LayerCut:
    """What a rank has of a layer, or of one that keeps codes.

    Attributes:
        shape: inputs and outputs of the whole layer.
        outputs: bounds of its outputs, one part after another.
    """

    shape: tuple[int, int]
    inputs: Bounds
    outputs: tuple[Bounds, ...]


class LayerPart(NamedTuple):
    """A layer of a checkpoint that a recorded layer has, perhaps beside others.

    Attributes:
        width: its outputs here; 0 where no adapter can change them.
        cut: the part of a rank, or all of a layer that keeps codes; None for all of a layer in floats.
    """

    name: str
    width: int
    cut: LayerCut | None = None


LayerParts: TypeAlias = tuple[LayerPart, ...]


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """The tables of one recorded linear layer, see `varlen_kernels.reference.add_adapters`.

    Attributes:
        parts: the layers of the checkpoint that it has.
        first: `[slots, inputs, ranks]`; of a layer that adapters replace, with a rank for each output.
        second: `[slots, ranks, width]`; None of a layer that adapters replace.
        spans: `[slots, parts, 4]` int32.
        bias: `[slots, outputs]`, what adapters add to the bias of a layer that they replace.
        base: weight `[inputs, outputs]` and bias of a layer that they replace.
    """

    parts: LayerParts
    first: State
    second: State | None
    spans: State
    bias: State | None = None
    base: tuple[Tensor, Tensor | None] | None = None

    @property
    def states(self) -> tuple[State, ...]:
        every = self.first, self.second, self.spans, self.bias
        return tuple(each for each in every if each is not None)


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """The tables of a program.

    Attributes:
        slots: number of adapters that they hold at once.
        ranks: the largest rank of the adapters of each layer, by its name in the checkpoint.
        replaced: names of the layers that an adapter brings whole, such as a classifier.
        seen: inputs and outputs of each layer that a recording has, by its name in the checkpoint.
        biased: names of the seen layers that have a bias.
        cut: names of the seen layers that ranks divide, or that keep codes.
        layers: the layers that were recorded with tables, by the name of their first part.
    """

    slots: int
    ranks: Mapping[str, int]
    replaced: AbstractSet[str] = frozenset()
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    biased: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    layers: dict[str, AdaptedLayer] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables of the layers that were recorded."""
        states = (state for layer in self.layers.values() for state in layer.states)
        return sum(prod(state.shape) * state.dtype.itemsize for state in states)

    def columns(self, parts: LayerParts) -> list[int]:
        """Return the first column of each layer in the first factor, and their number.

        There are none if no adapter changes one of them.
        """
        ranks = (self.ranks.get(part.name, 0) for part in parts)
        return [*accumulate((whole_steps(rank, RANK_STEP) for rank in ranks), initial=0)]

    def replaces(self, parts: LayerParts) -> bool:
        """Return whether an adapter brings this layer whole."""
        return any(part.name in self.replaced for part in parts)


def whole_steps(count: int, step: int) -> int:
    """Return a number, rounded up to a multiple of another one."""
    return -(-count // step) * step


def width_of(parts: LayerParts) -> int:
    """Return the columns of the second factor of some layers."""
    return whole_steps(max(part.width for part in parts), WIDTH_STEP)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The names of the inputs that say which rows of a dimension have an adapter.

    Attributes:
        dimension: the dimension that the rows are of, such as tokens.
    """

    dimension: str

    @property
    def rows(self) -> str:
        """The rows, sorted by slot, `[rows]` int32; also the name of their dimension."""
        return f"adapted_{self.dimension}"

    @property
    def bounds(self) -> str:
        """The bounds of the rows of each slot, `[slots + 1]` int32."""
        return f"cu_adapted_{self.dimension}"


def is_of_adapters(name: str) -> bool:
    """Return whether an input says which rows have an adapter."""
    return name.startswith(("adapted_", "cu_adapted_"))
