"""Space-time maps of a batch, by a program's plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from varlen.execution.packing import dims_of
from varlen.memory.planner import Layout
from varlen.program.program import Program


@dataclass(frozen=True, slots=True)
class Area:
    """One usage in space and time.

    Attributes:
        results: the results that lie there; several where ops work in place.
        offset, size: place, in bytes.
        first_op, last_op: inclusive.
    """

    results: tuple[str, ...]
    chunk: int
    offset: int
    size: int
    first_op: int
    last_op: int

    @property
    def name(self) -> str:
        """The kernels that write the results."""
        return ", ".join(result.rpartition(":")[2] for result in self.results)


@dataclass(frozen=True, slots=True)
class Map:
    """The plan of one batch.

    Attributes:
        peak_live: most bytes live at one op.
    """

    title: str
    areas: tuple[Area, ...]
    chunks: tuple[int, ...]
    footprint: int
    ops: tuple[str, ...]
    peak_live: int

    @property
    def ratio(self) -> float:
        """Footprint relative to the peak of live bytes; no plan is below 1."""
        return self.footprint / self.peak_live


def program_map(program: Program, layout: Layout, lengths: Sequence[int]) -> Map:
    """Return the map of one batch, as the arena plans it."""
    dims = dims_of(lengths)
    made = layout.plan(dims)
    results: dict[str, list[str]] = {}
    for name, usage in program.usage_of.items():
        results.setdefault(usage.name, []).append(name)
    areas = tuple(
        Area(tuple(results[use.name]), 0, offset, use.size.at(dims), use.first_op, use.last_op)
        for buffer, offset in zip(program.buffers, made.offsets, strict=True)
        for use in buffer.usages
    )
    ops = tuple(f"{number}:{op.kernel}" for number, op in enumerate(program.ops))
    title = _title(lengths)
    return Map(title, areas, (made.footprint,), made.footprint, ops, made.peak_live)


def _title(lengths: Sequence[int]) -> str:
    if len(lengths) == 1:
        return f"{lengths[0]} tokens"
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]} tokens"
    return f"{len(lengths)} sequences, {sum(lengths)} tokens"
