"""What keeping memory costs and saves: chunk lists after the paper, and the arena's one chunk, over streams.

Each request brings the paper's records for its length. What is counted needs no clock: bytes newly
taken, the most held, and what is held on average. The same table comes out everywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated

import typer

from varlen.memory.chunk import HostChunk
from varlen.memory.high_water import HighWater
from varlen.memory.planner import Order, Plan, Rules, plan
from varlen.memory.usage import conflicts, live_sizes
from varlen_tools import paper_records
from varlen_tools.bench_report import Cell, write_table

OUTPUT = Path("docs/benchmarks/plan_streams.csv")
# Requests in a row that leave a chunk unused, until it is released; the paper releases at once.
GRACES = (0, 4, 16, 64)
WINDOWS = (16, 64, 128, 256)
ORDERS: tuple[Order, ...] = ("opened", "smallest_first", "largest_first")
GROWTHS = (100, 150, 200)
_UNBOUNDED = 1 << 62
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Step:
    """What one request did.

    Attributes:
        taken: bytes newly allocated.
        allocations: how many that were.
        held: bytes held while it ran.
    """

    taken: int
    allocations: int
    held: int


# Serves one request of so many tokens.
Policy = Callable[[int], Step]


class ChunkList:
    """The paper's memory: chunks of many sizes, of which those that stay unused are released."""

    def __init__(self, rules: Rules, grace: int) -> None:
        """Hold nothing yet.

        Args:
            rules: for new chunks, and the order in which chunks are tried.
            grace: plans in a row that leave a chunk unused before it is released; 0 releases it at once.
        """
        self._rules = rules
        self._grace = grace
        self.chunks: list[int] = []
        self._unused: list[int] = []

    def __call__(self, length: int) -> Step:
        """Serve one request."""
        made = _plan(length, tuple(self.chunks), self._rules)
        opened = made.chunks[len(self.chunks) :]
        unused = [*self._unused, *(0 for _ in opened)]
        unused = [0 if used else n + 1 for n, used in zip(unused, made.extents, strict=True)]
        held = sum(made.chunks)
        kept = [i for i, n in enumerate(unused) if n <= self._grace]
        self.chunks = [made.chunks[i] for i in kept]
        self._unused = [unused[i] for i in kept]
        if not self._grace:
            # as published: what the request left unused is not counted as held
            held = sum(self.chunks)
        return Step(sum(opened), len(opened), held)


class OneChunk:
    """The arena's memory: address space, of which pages are taken as plans reach them."""

    def __init__(self, window: int) -> None:
        self._chunk = HostChunk(1 << 30)
        self._high_water = HighWater(window)

    def __call__(self, length: int) -> Step:
        """Serve one request."""
        footprint = footprint_of(length)
        reached = self._high_water.add(footprint)
        if reached is not None:
            self._chunk.release(reached)
        before = self._chunk.reserved_bytes
        self._chunk.reserve(footprint)
        taken = self._chunk.reserved_bytes - before
        return Step(taken, int(taken > 0), self._chunk.reserved_bytes)


class ExactlyEnough:
    """Memory of its own for each request, planned as a whole and released after it."""

    def __call__(self, length: int) -> Step:
        """Serve one request."""
        return Step(footprint_of(length), 1, footprint_of(length))


@lru_cache(maxsize=1024)
def footprint_of(length: int) -> int:
    """Return the footprint of one request in one chunk, in bytes."""
    return _plan(length, (_UNBOUNDED,), Rules(alignment=_ALIGNMENT)).footprint


@lru_cache(maxsize=1024)
def peak_live_of(length: int) -> int:
    """Return the most bytes live at one op of a request; no plan can use fewer."""
    return max(size.at(1, 1) for size in live_sizes(paper_records.usages(1, length)))


def _plan(length: int, chunks: Sequence[int], rules: Rules) -> Plan:
    usages = paper_records.usages(1, length)
    masks = conflicts([[(usage.first_op, usage.last_op)] for usage in usages])
    return plan([usage.size.fixed for usage in usages], masks, chunks=chunks, rules=rules)


def streams() -> dict[str, list[int]]:
    """Return the lengths of each stream: the two published ones, and one with long requests now and then."""
    mixed = [
        length if number % 400 < 40 else 5 + length // 8
        for number, length in enumerate(paper_records.lengths(2000, 500))
    ]
    return {
        "50 of 5-250": paper_records.lengths(50, 250),
        "150 of 5-500": paper_records.lengths(150, 500),
        "2000, a tenth long": mixed,
    }


def policies() -> Iterator[tuple[str, Callable[[], Policy]]]:
    """Yield the name of each policy, and what makes it afresh."""
    for order in ORDERS:
        for grace in GRACES:
            name = f"chunk list {order}, released after {grace}"
            yield name, partial(ChunkList, Rules(order=order), grace)
    for growth in GROWTHS:
        rules = Rules(order="largest_first", growth_percent=growth)
        yield f"chunk list largest_first, growth {growth} %", partial(ChunkList, rules, 0)
    yield "memory of its own for each request", ExactlyEnough
    for window in WINDOWS:
        yield f"one chunk, window {window}", partial(OneChunk, window)


def measure(name: str, policy: Policy, lengths: Sequence[int]) -> dict[str, Cell]:
    """Return the row of one policy on one stream."""
    steps = [policy(length) for length in lengths]
    held = sum(step.held for step in steps)
    return {
        "policy": name,
        "requests": len(lengths),
        "taken_bytes": sum(step.taken for step in steps),
        "allocations": sum(step.allocations for step in steps),
        "peak_bytes": max(step.held for step in steps),
        "mean_bytes": held // len(steps),
        "taken_bytes_per_request": sum(step.taken for step in steps) // len(steps),
        "held_over_peak_live": held / sum(peak_live_of(length) for length in lengths),
    }


def rows() -> list[dict[str, Cell]]:
    """Return the whole table."""
    return [
        {"stream": stream, **measure(name, make(), lengths)}
        for stream, lengths in streams().items()
        for name, make in policies()
    ]


def main(
    output: Annotated[Path, typer.Option(help="CSV that is replaced.")] = OUTPUT,
) -> None:
    """Print what each policy takes and holds on each stream, and write it to a CSV."""
    table = rows()
    write_table(output, table)
    for stream in streams():
        print(f"{stream}:  MiB taken, allocations, MiB at most, MiB on average, held / peak live")
        for row in (row for row in table if row["stream"] == stream):
            taken, peak, mean = (
                int(str(row[key])) / 2**20 for key in ("taken_bytes", "peak_bytes", "mean_bytes")
            )
            print(
                f"  {row['policy']:48} {taken:8.2f} {row['allocations']:5} {peak:7.2f} {mean:7.2f}"
                f" {row['held_over_peak_live']:6.2f}"
            )


if __name__ == "__main__":
    typer.run(main)
