"""The least footprint that any plan can have, by branch and bound: what greedy is held against.

Everything lies in one chunk, unaligned. Some least plan puts each record directly on what lies below
it, in the order of offsets: moving every record of a least plan down as far as it goes, from the
lowest up, keeps it one. So orders are searched, and a branch ends where the records still to come
cannot fit below the best plan so far.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from varlen.memory.planner import plan
from varlen.memory.usage import Lifetime, Size, Usage, conflicts, fold, live_sizes
from varlen_tools import paper_records, weightless
from varlen_tools.bench_kernels.grid import FULL
from varlen_tools.bench_report import Cell, write_table

OUTPUT = Path("docs/benchmarks/plan_gap.csv")
DEFAULT_NODES = 200_000
_PRINTED = ("records", "peak_live_bytes", "least_bytes", "greedy_bytes")
_UNBOUNDED = 1 << 62
# Of which bounds are published: (batch, length).
PAPER_SHAPES = ((1, 40), (1, 100), (1, 200), (1, 240), (4, 500), (20, 500))
# How a larger random program's results live on: mostly until the next op reads them, some as residuals.
_LIVES_ON = (1, 1, 1, 1, 2, 3, 5, 8)


@dataclass(frozen=True, slots=True)
class Least:
    """The result of a search.

    Attributes:
        footprint: of the best plan found, in bytes.
        is_proven: whether no plan is smaller; else the search ended early.
    """

    footprint: int
    is_proven: bool


def least_footprint(
    lifetimes: Sequence[Lifetime], sizes: Sequence[int], nodes: int = DEFAULT_NODES
) -> Least:
    """Return the least footprint of records with one lifetime each.

    Args:
        lifetimes: of each record.
        sizes: of each record, in bytes.
        nodes: placements after which the search ends.
    """
    return _Search(lifetimes, sizes, nodes).run()


def greedy_footprint(usages: Sequence[Usage], tokens: int = 1, sequences: int = 1) -> int:
    """Return the footprint of our planner for the same records, unaligned and not folded."""
    masks = conflicts([[(usage.first_op, usage.last_op)] for usage in usages])
    sizes = [usage.size.at(tokens, sequences) for usage in usages]
    return plan(sizes, masks, chunks=[_UNBOUNDED]).footprint


class _Search:
    def __init__(self, lifetimes: Sequence[Lifetime], sizes: Sequence[int], nodes: int) -> None:
        # only ops at which something begins matter: what is live together is live at one of them
        ops = sorted({first for first, _ in lifetimes})
        self._spans = [
            [i for i, op in enumerate(ops) if first <= op <= last] for first, last in lifetimes
        ]
        self._sizes = list(sizes)
        self._tops = [0] * len(ops)
        self._left = [0] * len(ops)
        for span, size in zip(self._spans, sizes, strict=True):
            for op in span:
                self._left[op] += size
        self._nodes = nodes
        self._seen: set[tuple[frozenset[int], tuple[int, ...]]] = set()
        self._bound = max(self._left, default=0)
        masks = conflicts([[lifetime] for lifetime in lifetimes])
        self._best = plan(sizes, masks, chunks=[_UNBOUNDED]).footprint

    def run(self) -> Least:
        self._descend(frozenset(range(len(self._sizes))), 0)
        return Least(self._best, self._nodes > 0 or self._best == self._bound)

    def _descend(self, left: frozenset[int], lowest: int) -> None:
        """Try every record that is left next, none below the last one."""
        if not left:
            self._best = min(self._best, max(self._tops, default=0))
            return
        reach = max(top + more for top, more in zip(self._tops, self._left, strict=True))
        state = (left, tuple(self._tops))
        if reach >= self._best or state in self._seen or self._nodes <= 0:
            return
        self._seen.add(state)
        # the largest first: good plans early. `lowest` is no part of the state: of two ways to one state, the first
        # one tried also leads, with what is left sorted in by offset, to every plan that the second leads to
        for record in sorted(left, key=lambda i: -self._sizes[i]):
            self._nodes -= 1
            span, size = self._spans[record], self._sizes[record]
            offset = max(self._tops[op] for op in span)
            if offset < lowest:
                continue
            kept = [self._tops[op] for op in span]
            for op in span:
                self._tops[op] = offset + size
                self._left[op] -= size
            self._descend(left - {record}, offset)
            for op, top in zip(span, kept, strict=True):
                self._tops[op] = top
                self._left[op] += size


def paper_rows(nodes: int) -> list[dict[str, Cell]]:
    """Return a row for each shape of the paper's records."""
    rows = []
    for batch, length in PAPER_SHAPES:
        usages = paper_records.usages(batch, length)
        rows.append(_row(f"paper {batch} x {length}", usages, nodes))
    return rows


def encoder_rows(nodes: int) -> list[dict[str, Cell]]:
    """Return a row for each of our encoders and each of the paper's shapes, packed."""
    return [
        _row(f"{shape.name} {batch} x {length}", _fixed(usages, batch * length, batch), nodes)
        for shape in FULL.encoders
        for usages in [weightless.record(shape).usages]
        for batch, length in PAPER_SHAPES
    ]


def random_rows(programs: int, nodes: int) -> list[dict[str, Cell]]:
    """Return a row for each of so many random programs, and of half as many larger ones.

    They are always the same: those of a shorter table are the first of a longer one.
    """
    rows = []
    for kind, make, count in (
        ("random", random_usages, programs),
        ("larger", larger_usages, programs // 2),
    ):
        numbers = random.Random(0)
        rows += [_row(f"{kind} {i}", make(numbers), nodes) for i in range(count)]
    return rows


def random_usages(numbers: random.Random) -> list[Usage]:
    """Return the records of a program of 8 to 14 ops, each writing one result of 1 to 4 hidden sizes of 256 bytes."""
    return [
        Usage(f"v{op}", op, op + numbers.choice([1, 1, 1, 2, 3, 5]), Size(fixed=256 * size))
        for op in range(numbers.randint(8, 14))
        for size in [numbers.choice([1, 1, 1, 2, 3, 4])]
    ]


def larger_usages(numbers: random.Random) -> list[Usage]:
    """Return the records of a program of 16 ops, each writing 1 to 48 times 64 bytes."""
    return [
        Usage(f"v{op}", op, op + lives_on, Size(fixed=64 * numbers.randint(1, 48)))
        for op in range(16)
        for lives_on in [numbers.choice(_LIVES_ON)]
    ]


def main(
    programs: Annotated[
        int, typer.Option(min=0, help="Random programs; half as many larger ones.")
    ] = 200,
    nodes: Annotated[int, typer.Option(min=1, help="Placements for each search.")] = DEFAULT_NODES,
    output: Annotated[Path, typer.Option(help="CSV that is replaced.")] = OUTPUT,
) -> None:
    """Print how far greedy is from the least footprint, and write every row to a CSV."""
    known, others = [*paper_rows(nodes), *encoder_rows(nodes)], random_rows(programs, nodes)
    write_table(output, [*known, *others])
    for row in known:
        print("  ".join(f"{key} {row[key]}" for key in _PRINTED))
    for kind in ("random", "larger"):
        _summarise(kind, [row for row in others if str(row["records"]).startswith(kind)])
    proven = sum(row["is_proven"] == "true" for row in [*known, *others])
    print(f"{proven} of {len(known) + len(others)} searches proved their plan the least")


def _summarise(kind: str, rows: Sequence[dict[str, Cell]]) -> None:
    # those that are not proven are the hard ones: the ratio to the bound counts them in
    proven = [row for row in rows if row["is_proven"] == "true"]
    for column, of in (
        ("greedy_over_least", proven),
        ("folded_over_least", proven),
        ("least_over_peak", proven),
        ("greedy_over_peak", rows),
    ):
        values = [float(str(row[column])) for row in of]
        if values:
            spread = f"mean {statistics.mean(values):.3f}, most {max(values):.3f}"
            print(f"{len(values):4} {kind} programs: {column} {spread}")


def _fixed(usages: Sequence[Usage], tokens: int, sequences: int) -> list[Usage]:
    return [replace(usage, size=Size(fixed=usage.size.at(tokens, sequences))) for usage in usages]


def _row(name: str, usages: Sequence[Usage], nodes: int) -> dict[str, Cell]:
    lifetimes = [(usage.first_op, usage.last_op) for usage in usages]
    sizes = [usage.size.at(1, 1) for usage in usages]
    bound = max((size.at(1, 1) for size in live_sizes(usages)), default=0)
    least = least_footprint(lifetimes, sizes, nodes)
    greedy = greedy_footprint(usages)
    folded = fold(usages)
    masks = conflicts([buffer.lifetimes for buffer in folded])
    together = plan([b.size.at(1, 1) for b in folded], masks, chunks=[_UNBOUNDED]).footprint
    return {
        "records": name,
        "peak_live_bytes": bound,
        "least_bytes": least.footprint,
        "is_proven": str(least.is_proven).lower(),
        "greedy_bytes": greedy,
        "folded_bytes": together,
        "greedy_over_least": greedy / least.footprint,
        "folded_over_least": together / least.footprint,
        "least_over_peak": least.footprint / bound,
        "greedy_over_peak": greedy / bound,
    }


if __name__ == "__main__":
    typer.run(main)
