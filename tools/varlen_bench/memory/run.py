"""The order of a run: each system in its own process, then a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from varlen_bench.compare.results import Result
from varlen_bench.compare.systems import System
from varlen_bench.compare.turns import noted_failure
from varlen_bench.harness.command import Progress
from varlen_bench.harness.worker import Message, WorkerError, ask_once
from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, POSITIONS, Case
from varlen_bench.memory.rows import EXACT, STUB, add_ratios, empty_result
from varlen_bench.memory.soak import Soak, soak
from varlen_bench.peers.checkpoints import random_checkpoint
from varlen_client import VarlenClientError
from varlen_tools.local_server import ServerError

# Without an arena, every third request by length is run.
_NO_ARENA_STEP = 3

Device: TypeAlias = Literal["cpu", "cuda"]
# Measures the memory of a system on a case, or varlen's speed without a system.
Ask: TypeAlias = Callable[[System | None, Case], Message]


def measure_cases(
    cases: list[Case], report: Progress, *, device: Device, threads: int
) -> Iterator[list[Result]]:
    """Yield the results of each case; all cases are of one encoder."""
    with random_checkpoint(cases[0].encoder, POSITIONS) as folder:
        for case in cases:
            ask = partial(ask_worker, folder=folder, device=device, threads=threads)
            yield measure_case(case, device, ask, report)


def measure_case(case: Case, device: Device, ask: Ask, report: Progress) -> list[Result]:
    """Return the results of a case; one that failed has the reason."""
    named = f"{case.encoder.name}, {case.batch} a request"
    empty = partial(empty_result, model=case.encoder.name, device=device, batch=case.batch)
    results: list[Result] = []
    exact = empty(EXACT, requests=len(case.lengths))
    for system in (OURS, NO_ARENA, PEER):
        report(f"{named}: memory of {system.name}")
        part = case.every(_NO_ARENA_STEP) if system == NO_ARENA else case
        result = empty(system, requests=len(part.lengths))
        results.append(result)
        with noted_failure([result], report):
            own, *others = ask(system, part)["figures"]
            result.rounds.append(own)
            exact.rounds += others
    add_ratios(results)
    ours = results[0]
    report(f"{named}: speed of {ours.system.name}")
    try:
        ours.rounds += [{ours.speed: speed} for speed in ask(None, case)["speeds"]]
    except WorkerError as error:
        ours.note = "; ".join(filter(None, [ours.note, f"no speed: {error}"]))
    return [*results, exact] if exact.rounds else results


def ask_worker(
    system: System | None, case: Case, folder: Path, device: Device, threads: int
) -> Message:
    """Return the answer of a process that measures a system, with the checkpoint in `folder`."""
    argument = {"case": asdict(case), "folder": str(folder), "device": device, "threads": threads}
    module, log = "varlen_bench.memory.measure", folder / "worker.log"
    return ask_once(module, argument, log, threads=threads, system=system and asdict(system))


def measure_server(settings: Soak, report: Progress) -> list[Result]:
    """Return the results of a server's processes, or one with the reason why it failed."""
    report(f"{settings.requests:,} requests to a server with {settings.model}")
    found = [settings.result(STUB)]
    with noted_failure(found, report, ServerError, VarlenClientError, OSError):
        found[:] = soak(settings)
    return found
