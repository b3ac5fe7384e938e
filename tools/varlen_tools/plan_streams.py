"""What keeping memory costs and saves: chunk lists after the paper, and the arena's one chunk, over streams.

Each request brings the records of a program for its length. What is counted needs no clock: bytes
newly taken, the most held, and what is held on average. The same table comes out everywhere.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from varlen.memory.arena import HighWater
from varlen.memory.chunk import HostChunk
from varlen.memory.planner import Order, Rules
from varlen_tools import paper_records
from varlen_tools.bench_report import Cell, write_table
from varlen_tools.plan_records import Records, all_records

OUTPUT = Path("docs/benchmarks/plan_streams.csv")
# Requests in a row that leave a chunk unused, until it is released; the paper releases at once. None: never.
GRACES = (0, 1, 4, 16, 64, None)
WINDOWS = (16, 32, 64, 128, 256)
ORDERS: tuple[Order, ...] = ("opened", "smallest_first", "largest_first")
GROWTHS = (100, 150, 200)
LEAST_BYTES = (64 << 10, 8 << 20)
# Address space; more than any request here reaches.
_ROOM = 1 << 30


@dataclass(frozen=True, slots=True)
class Step:
    """What one request did.

    Attributes:
        taken: bytes newly allocated.
        allocations: how many that were.
        held: bytes held while it ran; what its plan released is gone by then.
    """

    taken: int
    allocations: int
    held: int


# Serves one request of so many tokens.
Policy = Callable[[int], Step]


class ChunkList:
    """The paper's memory: chunks of many sizes, of which those that stay unused are released."""

    def __init__(self, rules: Rules, grace: int | None, records: Records) -> None:
        """Hold nothing yet.

        Args:
            rules: for new chunks, and the order in which chunks are tried.
            grace: plans in a row that may leave a chunk unused before one more releases it; None keeps it.
            records: of requests.
        """
        self._rules = rules
        self._grace = grace
        self._records = records
        self.chunks: list[int] = []
        self._unused: list[int] = []

    def __call__(self, length: int) -> Step:
        """Serve one request."""
        made = self._records.plan(length, self.chunks, self._rules)
        opened = made.chunks[len(self.chunks) :]
        before = [*self._unused, *(0 for _ in opened)]
        unused = [0 if used else n + 1 for n, used in zip(before, made.extents, strict=True)]
        kept = [i for i, n in enumerate(unused) if self._grace is None or n <= self._grace]
        self.chunks = [made.chunks[i] for i in kept]
        self._unused = [unused[i] for i in kept]
        return Step(sum(opened), len(opened), sum(self.chunks))


class OneChunk:
    """The arena's memory: address space, of which pages are taken as plans reach them."""

    def __init__(self, window: int, records: Records) -> None:
        self._chunk = HostChunk(_ROOM)
        self._high_water = HighWater(window)
        self._records = records

    def __call__(self, length: int) -> Step:
        """Serve one request."""
        footprint = self._records.in_one_chunk(length).footprint
        reached = self._high_water.add(footprint)
        if reached is not None:
            self._chunk.release(reached)
        before = self._chunk.reserved_bytes
        self._chunk.reserve(footprint)
        taken = self._chunk.reserved_bytes - before
        return Step(taken, int(taken > 0), self._chunk.reserved_bytes)


class ExactlyEnough:
    """Memory of its own for each request, planned as a whole and released after it."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __call__(self, length: int) -> Step:
        """Serve one request."""
        footprint = self._records.in_one_chunk(length).footprint
        return Step(footprint, 1, footprint)


def streams() -> dict[str, list[int]]:
    """Return the lengths of each stream: the two published ones, and short requests with long ones among them."""
    drawn = paper_records.lengths(2000, 500)
    numbers = random.Random(0)
    return {
        "50 of 5-250": paper_records.lengths(50, 250),
        "150 of 5-500": paper_records.lengths(150, 500),
        "2000, 40 long of each 400": [
            length if number % 400 < 40 else 5 + length // 8 for number, length in enumerate(drawn)
        ],
        "2000, each long by 1 in 100": [
            length if numbers.random() < 0.01 else 5 + length // 8 for length in drawn
        ],
    }


def policies() -> Iterator[tuple[str, Callable[[Records], Policy]]]:
    """Yield the name of each policy, and what makes it afresh."""
    for order in ORDERS:
        for grace in GRACES:
            kept = "never released" if grace is None else f"released after {grace}"
            yield f"chunk list {order}, {kept}", partial(ChunkList, Rules(order=order), grace)
    for growth in GROWTHS:
        rules = Rules(order="largest_first", growth_percent=growth)
        yield f"chunk list largest_first, growth {growth} %", partial(ChunkList, rules, 0)
    for least in LEAST_BYTES:
        rules = Rules(order="largest_first", least_bytes=least)
        yield f"chunk list largest_first, least {least >> 10} KiB", partial(ChunkList, rules, 0)
    yield "memory of its own for each request", ExactlyEnough
    for window in WINDOWS:
        yield f"one chunk, window {window}", partial(OneChunk, window)


def measure(policy: Policy, records: Records, lengths: Sequence[int]) -> dict[str, Cell]:
    """Return the figures of one policy on one stream."""
    steps = [policy(length) for length in lengths]
    taken, held = sum(step.taken for step in steps), sum(step.held for step in steps)
    return {
        "requests": len(steps),
        "taken_bytes": taken,
        "allocations": sum(step.allocations for step in steps),
        "peak_bytes": max(step.held for step in steps),
        "mean_bytes": held // len(steps),
        "taken_bytes_per_request": taken // len(steps),
        "held_over_peak_live": held / sum(records.in_one_chunk(n).peak_live for n in lengths),
    }


def rows(longest_stream: int | None = None) -> list[dict[str, Cell]]:
    """Return the table: all of it, or of streams of at most so many requests."""
    return [
        {
            "records": records.name,
            "stream": stream,
            "policy": name,
            **measure(make(records), records, lengths),
        }
        for records in all_records()
        for stream, lengths in streams().items()
        if longest_stream is None or len(lengths) <= longest_stream
        for name, make in policies()
    ]


def main(
    output: Annotated[Path, typer.Option(help="CSV that is replaced.")] = OUTPUT,
) -> None:
    """Print what each policy takes and holds on each stream, and write it to a CSV."""
    table = rows()
    write_table(output, table)
    title = ""
    for row in table:
        if title != (title := f"{row['records']}, {row['stream']}"):
            print(
                f"{title}:  MiB taken, allocations, MiB at most, MiB on average, held / peak live"
            )
        taken, peak, mean = (
            int(str(row[key])) / 2**20 for key in ("taken_bytes", "peak_bytes", "mean_bytes")
        )
        print(
            f"  {row['policy']:48} {taken:8.2f} {row['allocations']:5} {peak:7.2f} {mean:7.2f}"
            f" {row['held_over_peak_live']:6.2f}"
        )


if __name__ == "__main__":
    typer.run(main)
