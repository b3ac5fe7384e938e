"""Systems that take turns: a process for each, measured one after another in every round.

A drift of the machine affects all systems of a round. A system that fails keeps its reason; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from varlen_bench.compare.results import AnyResult, Result
from varlen_bench.compare.systems import System
from varlen_bench.harness.command import Progress
from varlen_bench.harness.worker import WorkerError, WorkerProcess
from varlen_bench.peers.engines import interpreter
from varlen_tools.messages import first_line

AnySystem = TypeVar("AnySystem")

# Threads of the last system stop spinning in this time.
_PAUSE_SECONDS = 0.2


def start_system(
    module: str, system: System, checkpoint: Path, scratch: Path, *, threads: int, **more: object
) -> WorkerProcess:
    """Start the process of a system, in the environment of its engine.

    Args:
        module: module of the worker, whose argument also has `more`.
        scratch: folder that gets a folder of the system, for its log and files.

    Raises:
        RuntimeError: the environment does not exist.
    """
    python = interpreter(system.engine)
    folder = scratch / system.name
    folder.mkdir(parents=True)
    paths = {"checkpoint": str(checkpoint.resolve()), "scratch": str(folder)}
    cores = system.cores(threads)
    argument = {"system": asdict(system), **paths, "cores": asdict(cores), **more}
    log, threads = folder / "log", cores.threads
    return WorkerProcess(module, argument, log, threads=threads, python=python)


@contextmanager
def running(
    results: Sequence[AnyResult],
    start: Callable[[System], WorkerProcess],
    prepare: Callable[[WorkerProcess, list[AnyResult]], None],
    report: Progress,
) -> Iterator[dict[str, WorkerProcess]]:
    """Yield the processes of the systems that can be started and prepared, by name.

    Args:
        results: empty results of each system.
        prepare: gets the process of a system and its results.
    """
    with ExitStack() as processes:
        ready: dict[str, WorkerProcess] = {}
        for system in dict.fromkeys(result.system for result in results):
            own = [result for result in results if result.system == system]
            report(f"prepare {system.name}")
            with noted_failure(own, report):
                process = processes.enter_context(start(system))
                prepare(process, own)
                ready[system.name] = process
        yield ready


def measure_in_turns(
    results: Sequence[AnyResult],
    measure: Callable[[AnyResult], dict[str, float]],
    *,
    rounds: int,
    report: Progress,
) -> None:
    """Append the figures of each round to the results of systems that run."""
    for number in range(rounds):
        for result in results:
            if result.has_failed:
                continue
            what = filter(None, (result.model or result.workload, result.arrivals))
            report(f"{', '.join(what)}: round {number + 1} of {rounds}, {result.system.name}")
            time.sleep(_PAUSE_SECONDS)
            own = [each for each in results if each.system == result.system]
            with noted_failure(own, report):
                result.rounds.append(measure(result))


def in_turn(systems: Sequence[AnySystem], turn: int) -> Sequence[AnySystem]:
    """Return systems in the order of a turn: A B, B A, and so on."""
    return systems[::-1] if turn % 2 else systems


@contextmanager
def noted_failure(
    results: Sequence[Result], report: Progress, *others: type[Exception]
) -> Iterator[None]:
    """Turn an error into failed results of a system, with its first line.

    Args:
        others: kinds of errors beside the errors of a worker.
    """
    expected: tuple[type[Exception], ...] = (WorkerError, RuntimeError, ValueError, *others)
    try:
        yield
    except expected as error:
        note = f"did not run: {first_line(error)}".replace(str(Path.home()), "~")
        for result in results:
            result.note, result.has_failed = note, True
            result.rounds.clear()
        report(f"{results[0].system.name} {note}")
