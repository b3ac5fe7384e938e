"""Measurements of ranks: each starts its processes, and yields rows as it finds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from varlen_bench.harness.command import Progress
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import Spread, rounded
from varlen_bench.harness.worker import WorkerProcess

Row: TypeAlias = dict[str, Cell]

COLUMNS = (
    "measurement", "case", "system", "ranks", "unit", "median", "p20", "p80", "least", "samples",
    "load",
)  # fmt: skip

# Of hidden states of 768 features: one token, a decode step of 32 sequences, and a prefill.
SHAPES = ((1, 768), (32, 768), (512, 768))
# How ranks add: inside a step, as an op that Python calls, and by PyTorch's own library for CPUs.
SYSTEMS = ("step", "op", "gloo")
_SAMPLES_OF_ROUND, _EXCHANGES = 20, 50


@dataclass(frozen=True, slots=True)
class Settings:
    """What every measurement is given.

    Attributes:
        ranks: number of processes.
        rounds: rounds in which systems take turns.
        scratch: an empty folder.
        progress: prints a line.
    """

    ranks: int
    rounds: int
    scratch: Path
    progress: Progress


def measure_sums(settings: Settings) -> Iterator[Row]:
    """Measure sums of hidden states over all ranks."""
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(rank, settings)) for rank in range(settings.ranks)]
        pool = stack.enter_context(ThreadPoolExecutor(settings.ranks))
        for rows, columns in SHAPES:
            load = os.getloadavg()[0]
            seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            for round_number in range(settings.rounds):
                first = round_number % len(SYSTEMS)
                for system in SYSTEMS[first:] + SYSTEMS[:first]:
                    seconds[system] += _ask(pool, workers, system, rows, columns)
            for system, found in seconds.items():
                row = row_of("all_reduce", f"{rows}x{columns} fp32", system, settings.ranks, found)
                settings.progress(f"{row['case']} {system}: {row['median']} us")
                yield row | {"load": rounded(load, 2)}


# What the command measures, by name.
MEASUREMENTS: Mapping[str, Callable[[Settings], Iterator[Row]]] = {"all_reduce": measure_sums}


def row_of(measurement: str, case: str, system: str, ranks: int, seconds: list[float]) -> Row:
    """Return the row of some times, in microseconds, without the load."""
    microseconds = [1e6 * each for each in seconds]
    spread = Spread.of(microseconds)
    return {
        "measurement": measurement,
        "case": case,
        "system": system,
        "ranks": ranks,
        "unit": "us",
        "median": rounded(spread.median, 2),
        "p20": rounded(spread.p20, 2),
        "p80": rounded(spread.p80, 2),
        "least": rounded(min(microseconds), 2),
        "samples": spread.count,
    }


def _worker(rank: int, settings: Settings) -> WorkerProcess:
    argument = {"rank": rank, "size": settings.ranks, "folder": str(settings.scratch)}
    log = settings.scratch / f"rank{rank}.log"
    return WorkerProcess("varlen_bench.ranks.exchange", argument, log, threads=1)


def _ask(
    pool: ThreadPoolExecutor, workers: list[WorkerProcess], system: str, rows: int, columns: int
) -> list[float]:
    """Return the samples of rank 0; all ranks run the order together."""
    order = {
        "system": system,
        "rows": rows,
        "columns": columns,
        "samples": _SAMPLES_OF_ROUND,
        "exchanges": _EXCHANGES,
    }
    first, *_ = [each.result() for each in [pool.submit(w.ask, **order) for w in workers]]
    seconds: list[float] = first["seconds"]
    return seconds
