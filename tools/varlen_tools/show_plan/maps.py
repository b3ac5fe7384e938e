"""Space-time maps: where every usage of a batch lies, and when, by a program's plan or the paper's rules."""

from collections.abc import Sequence
from dataclasses import dataclass

from varlen.execution.packing import dims_of
from varlen.memory.layout import Layout
from varlen.memory.usage import live_sizes
from varlen.program.program import Program
from varlen_tools.show_plan import paper


@dataclass(frozen=True, slots=True)
class Area:
    """One usage in space and time.

    Attributes:
        name: the kernels that write it, or the record's name.
        results: the results that lie there; more than one where ops work in place.
        chunk: number of the chunk.
        offset, size: in bytes.
        first_op, last_op: inclusive.
    """

    name: str
    results: tuple[str, ...]
    chunk: int
    offset: int
    size: int
    first_op: int
    last_op: int


@dataclass(frozen=True, slots=True)
class Map:
    """The plan of one batch.

    Attributes:
        title: description of the batch.
        areas: every usage.
        chunks: size of each chunk, in bytes.
        footprint: used bytes of all chunks.
        ops: name of each op.
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
    """Return the map of one batch that runs as a whole, in the arena.

    Args:
        program: its usages are drawn.
        layout: plans for it.
        lengths: of the batch's sequences, in tokens.
    """
    dims = dims_of(lengths)
    made = layout.plan(dims)
    results: dict[str, list[str]] = {}
    for name, usage in program.usage_of.items():
        results.setdefault(usage.name, []).append(name)
    areas = tuple(
        Area(
            name=", ".join(name.partition(":")[2] for name in results[usage.name]),
            results=tuple(results[usage.name]),
            chunk=0,
            offset=offset,
            size=usage.size.at(dims),
            first_op=usage.first_op,
            last_op=usage.last_op,
        )
        for buffer, offset in zip(program.buffers, made.offsets, strict=True)
        for usage in buffer.usages
    )
    return Map(
        title=_title(lengths),
        areas=areas,
        chunks=(made.footprint,),
        footprint=made.footprint,
        ops=tuple(f"{number}:{op.kernel}" for number, op in enumerate(program.ops)),
        peak_live=made.peak_live,
    )


def paper_maps(lengths: Sequence[int]) -> list[Map]:
    """Return maps of the paper's records by its rules: each request finds the chunks of the one before."""
    maps: list[Map] = []
    for length in lengths:
        usages = paper.bert_usages(1, length)
        made = paper.plan_chunks(usages, maps[-1].chunks if maps else ())
        areas = tuple(
            Area(
                name=usage.name,
                results=(usage.name,),
                chunk=chunk,
                offset=offset,
                size=usage.size.fixed,
                first_op=usage.first_op,
                last_op=usage.last_op,
            )
            for usage, (chunk, offset) in zip(usages, made.places, strict=True)
        )
        one = Map(
            title=_title([length]),
            areas=areas,
            chunks=made.chunks,
            footprint=sum(made.extents),
            ops=tuple(f"op {op}" for op in range(1 + max(usage.last_op for usage in usages))),
            peak_live=max(size.fixed for size in live_sizes(usages)),
        )
        maps.append(one)
    return maps


def _title(lengths: Sequence[int]) -> str:
    if len(lengths) == 1:
        return f"{lengths[0]} tokens"
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]} tokens"
    return f"{len(lengths)} sequences, {sum(lengths)} tokens"
