"""Measurements of ranks: each starts its processes, and yields rows as it finds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from varlen_bench.harness.command import Progress
from varlen_bench.harness.neighbour import half_a_busy_core
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import Spread, rounded
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.ranks import models

Row: TypeAlias = dict[str, Cell]
_System = TypeVar("_System")

COLUMNS = (
    "measurement", "case", "system", "ranks", "unit", "median", "p20", "p80", "least", "samples",
    "load",
)  # fmt: skip

# Of hidden states of 768 features: one token, a decode step of 32 sequences, and a prefill.
SHAPES = ((1, 768), (32, 768), (512, 768))
# How ranks add: inside a step, as an op that Python calls, and by PyTorch's own library for CPUs.
SYSTEMS = ("step", "op", "gloo")
_SAMPLES_OF_ROUND, _EXCHANGES = 20, 50
# Fewer than a socket holds: nothing reads them meanwhile.
_MESSAGES = 8


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
                yield _timed(settings, "all_reduce", f"{rows}x{columns} fp32", system, found, load)


def measure_control(settings: Settings) -> Iterator[Row]:
    """Measure what rank 0 does for the other ranks before each step."""
    for sequences in (1, 32):
        load = os.getloadavg()[0]
        found = models.control_seconds(sequences, settings.rounds * _SAMPLES_OF_ROUND, _MESSAGES)
        yield _timed(settings, "control", f"{sequences} sequences", "pack and send", found, load)


def measure_decode(settings: Settings) -> Iterator[Row]:
    """Measure decode steps of a GPT-2-small, and the memory of its processes."""
    for dtype in models.DTYPES:
        with models.generators(settings.scratch, settings.ranks, dtype) as compared:
            for sequences in models.SEQUENCES:
                case = f"gpt2-small {dtype}, {sequences} sequences"
                ask = partial(models.step_seconds, sequences=sequences)
                yield from _in_turns(settings, "decode", case, compared, ask)
            for system, generator in compared.items():
                mebibytes = models.rank_mebibytes(generator)
                settings.progress(f"largest process of {system}: {mebibytes} MiB")
                yield {
                    **row_of("memory", f"gpt2-small {dtype}", system, settings.ranks, [mebibytes]),
                    "unit": "MiB",
                    "load": rounded(os.getloadavg()[0], 2),
                }


def measure_beside(settings: Settings) -> Iterator[Row]:
    """Measure decode steps of a GPT-2-small while other work keeps half a core busy."""
    for dtype in models.DTYPES:
        with models.generators(settings.scratch, settings.ranks, dtype) as compared:
            for sequences in models.SEQUENCES:
                case = f"gpt2-small {dtype}, {sequences} sequences, half a core busy"
                ask = partial(models.step_seconds, sequences=sequences)
                with half_a_busy_core():
                    yield from _in_turns(settings, "decode", case, compared, ask)


def measure_stages(settings: Settings) -> Iterator[Row]:
    """Measure tokens of a GPT-2-small that stages hold, and their idle time."""
    for dtype in models.DTYPES:
        with models.generators(
            settings.scratch, settings.ranks, dtype, "pipeline_parallel"
        ) as compared:
            for sequences in models.SEQUENCES:
                load = os.getloadavg()[0]
                case = f"gpt2-small {dtype}, {sequences} sequences"
                found = {system: list[tuple[float, float]]() for system in compared}
                for number in range(settings.rounds + 1):
                    names = list(compared)
                    for system in names if number % 2 else names[::-1]:
                        sample = models.shares_of_tokens(compared[system], sequences)
                        if number:
                            found[system].append(sample)
                for system, samples in found.items():
                    seconds, idle = zip(*samples, strict=True)
                    yield _timed(settings, "token", case, system, list(seconds), load)
                    if system == "stages":
                        percent = [100 * each for each in idle]
                        row = row_of("bubble", case, system, settings.ranks, percent)
                        settings.progress(f"bubble {case}: {row['median']} %")
                        yield row | {"unit": "%", "load": rounded(load, 2)}


def measure_encoder(settings: Settings) -> Iterator[Row]:
    """Measure lone texts of a BERT-base."""
    with models.encoders(settings.scratch, settings.ranks) as compared:
        for length in models.LENGTHS:
            case = f"bert-base fp32, one text of {length} tokens"
            ask = partial(models.text_seconds, length=length)
            yield from _in_turns(settings, "encoder", case, compared, ask)


# What the command measures, by name.
MEASUREMENTS: Mapping[str, Callable[[Settings], Iterator[Row]]] = {
    "all_reduce": measure_sums,
    "control": measure_control,
    "decode": measure_decode,
    "beside": measure_beside,
    "stages": measure_stages,
    "encoder": measure_encoder,
}


def _in_turns(
    settings: Settings,
    measurement: str,
    case: str,
    compared: Mapping[str, _System],
    ask: Callable[[_System], list[float]],
) -> Iterator[Row]:
    """Yield the rows of systems that take turns, after one round that does not count."""
    load, seconds = os.getloadavg()[0], {system: list[float]() for system in compared}
    for number in range(settings.rounds + 1):
        names = list(compared)
        for system in names if number % 2 else names[::-1]:
            found = ask(compared[system])
            if number:
                seconds[system] += found
    for system, found in seconds.items():
        yield _timed(settings, measurement, case, system, found, load)


def _timed(
    settings: Settings, measurement: str, case: str, system: str, seconds: list[float], load: float
) -> Row:
    """Return the row of some times, and report it."""
    times = [1e6 * each for each in seconds]
    row = row_of(measurement, case, system, settings.ranks, times)
    settings.progress(f"{measurement} {case}, {system}: {row['median']} us")
    return row | {"load": rounded(load, 2)}


def row_of(measurement: str, case: str, system: str, ranks: int, found: list[float]) -> Row:
    """Return the row of some times in microseconds, without the load."""
    spread = Spread.of(found)
    return {
        "measurement": measurement,
        "case": case,
        "system": system,
        "ranks": ranks,
        "unit": "us",
        "median": rounded(spread.median, 2),
        "p20": rounded(spread.p20, 2),
        "p80": rounded(spread.p80, 2),
        "least": rounded(min(found), 2),
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
