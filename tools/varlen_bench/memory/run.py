"""The order of a run: each system in its own process, then a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

from varlen_bench.harness.command import Progress
from varlen_bench.harness.worker import Message, WorkerError, ask_once
from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, POSITIONS, Case
from varlen_bench.memory.rows import STUB, Row, empty_row, finish_rows
from varlen_bench.memory.soak import Soak, soak
from varlen_bench.peers.checkpoints import save_random_checkpoint
from varlen_client import VarlenClientError
from varlen_tools.local_server import ServerError

# Without an arena, every third request by length is run.
_NO_ARENA_STEP = 3

Device: TypeAlias = Literal["cpu", "cuda"]
# Measures a system, or "speed", on a case.
Ask: TypeAlias = Callable[[str, Case], Message]


def measure_cases(
    cases: list[Case], report: Progress, *, device: Device, threads: int
) -> Iterator[list[Row]]:
    """Yield the rows of each case; all cases are of one encoder."""
    with TemporaryDirectory(prefix="varlen-bench-") as scratch:
        folder = Path(scratch)
        save_random_checkpoint(cases[0].encoder, folder, POSITIONS)
        for case in cases:
            ask = partial(ask_worker, folder=folder, device=device, threads=threads)
            yield measure_case(case, device, ask, report)


def measure_case(case: Case, device: Device, ask: Ask, report: Progress) -> list[Row]:
    """Return the rows of a case; one that failed has the reason."""
    named = f"{case.encoder.name}, {case.batch} a request"
    rows: list[Row] = []
    for name in (OURS, NO_ARENA, PEER):
        report(f"{named}: memory of {name}")
        part = case.every(_NO_ARENA_STEP) if name == NO_ARENA else case
        try:
            rows += [Row(**row) for row in ask(name, part)["rows"]]
        except WorkerError as error:
            rows.append(empty_row(case, name, device, f"did not run: {error}"))
    report(f"{named}: speed of {OURS}")
    try:
        return finish_rows(rows, ask("speed", case)["speed"])
    except WorkerError as error:
        return finish_rows(rows, f"no speed: {error}")


def ask_worker(what: str, case: Case, folder: Path, device: Device, threads: int) -> Message:
    """Return the answer of a process that measures `what`, with the checkpoint in `folder`."""
    argument = {"case": asdict(case), "folder": str(folder), "device": device, "threads": threads}
    module, log = "varlen_bench.memory.measure", folder / "worker.log"
    return ask_once(module, argument, log, threads=threads, measure=what)


def measure_server(settings: Soak, report: Progress) -> list[Row]:
    """Return the rows of a server's processes, or one with the reason why it failed."""
    report(f"{settings.requests:,} requests to a server with {settings.model}")
    try:
        return soak(settings)
    except (ServerError, VarlenClientError, RuntimeError, OSError) as error:
        return [replace(settings.row(STUB), note=f"did not run: {str(error).splitlines()[0]}")]
