"""What is drawn: where every usage of a batch lies, and when, read from a program's plan or the paper's records."""

from collections.abc import Sequence
from dataclasses import dataclass

from varlen.execution.packing import dims_of
from varlen.memory.layout import Layout
from varlen.memory.planner import Plan, Rules, plan
from varlen.memory.usage import Usage, conflicts, live_sizes
from varlen.program.program import Program
from varlen_tools.show_plan import paper_records


@dataclass(frozen=True, slots=True)
class Area:
    """One usage in space and time.

    Attributes:
        name: the kernels that write it, or the record's name.
        written: the values that lie there; more than one where ops work in place.
        chunk, offset, size: where it lies, in bytes.
        first_op, last_op: when, inclusive.
    """

    name: str
    written: tuple[str, ...]
    chunk: int
    offset: int
    size: int
    first_op: int
    last_op: int


@dataclass(frozen=True, slots=True)
class Map:
    """The plan of one batch.

    Attributes:
        title: which batch.
        areas: every usage.
        chunks: size of each chunk, in bytes.
        extents: how far each is used, in bytes.
        ops: name of each op.
        peak_live: the most bytes live at one op.
    """

    title: str
    areas: tuple[Area, ...]
    chunks: tuple[int, ...]
    extents: tuple[int, ...]
    ops: tuple[str, ...]
    peak_live: int

    @property
    def footprint(self) -> int:
        """Bytes used of all chunks."""
        return sum(self.extents)


def program_map(program: Program, layout: Layout, lengths: Sequence[int]) -> Map:
    """Return the map of one batch that runs as a whole, in the arena.

    Args:
        program: its records are drawn.
        layout: plans for it.
        lengths: of the batch's sequences, in tokens.
    """
    dims = dims_of(lengths)
    made = layout.plan(dims)
    written: dict[str, list[str]] = {}
    for name, usage in program.usage_of.items():
        written.setdefault(usage.name, []).append(name)
    areas = tuple(
        Area(
            ", ".join(name.partition(":")[2] for name in written[usage.name]),
            tuple(written[usage.name]),
            0,
            offset,
            usage.size.at(dims),
            usage.first_op,
            usage.last_op,
        )
        for buffer, offset in zip(program.buffers, made.offsets, strict=True)
        for usage in buffer.usages
    )
    return Map(
        _title(lengths),
        areas,
        (made.footprint,),
        (made.footprint,),
        tuple(f"{number}:{op.kernel}" for number, op in enumerate(program.ops)),
        made.peak_live,
    )


def paper_maps(lengths: Sequence[int]) -> list[Map]:
    """Return the maps of the paper's records under its rules: each request finds the chunks that the last one left."""
    maps: list[Map] = []
    for length in lengths:
        usages = paper_records.usages(1, length)
        masks = conflicts([[(usage.first_op, usage.last_op)] for usage in usages])
        sizes = [usage.size.fixed for usage in usages]
        made = plan(sizes, masks, chunks=maps[-1].chunks if maps else (), rules=Rules())
        maps.append(_paper_map(length, usages, made))
    return maps


def _paper_map(length: int, usages: Sequence[Usage], made: Plan) -> Map:
    areas = tuple(
        Area(
            usage.name,
            (usage.name,),
            chunk,
            offset,
            usage.size.fixed,
            usage.first_op,
            usage.last_op,
        )
        for usage, (chunk, offset) in zip(usages, made.places, strict=True)
    )
    last = max(usage.last_op for usage in usages)
    return Map(
        _title([length]),
        areas,
        made.chunks,
        made.extents,
        tuple(f"op {op}" for op in range(last + 1)),
        max(size.fixed for size in live_sizes(usages)),
    )


def _title(lengths: Sequence[int]) -> str:
    if len(set(lengths)) == 1:
        return (
            f"{len(lengths)} x {lengths[0]} tokens" if len(lengths) > 1 else f"{lengths[0]} tokens"
        )
    return f"{len(lengths)} sequences, {sum(lengths)} tokens"
