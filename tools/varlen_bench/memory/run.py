"""The order of events: an encoder's checkpoint, its cases, each system in a process of its own; then the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

from varlen_bench.kernels.encoder_peers import save_random_checkpoint
from varlen_bench.memory import rows
from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, POSITIONS, Case, Name
from varlen_bench.memory.process import WorkerError, ask
from varlen_bench.memory.rows import Row
from varlen_bench.memory.soak import Soak, soak
from varlen_bench.memory.worker import Order
from varlen_tools.local_server import ServerError

# Without an arena, every so many-th request by length is run.
_NO_ARENA_STEP = 3

Say: TypeAlias = Callable[[str], object]
Device: TypeAlias = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure: on which device, with how many cores."""

    device: Device
    threads: int


def measure_cases(cases: list[Case], settings: Settings, say: Say) -> Iterator[list[Row]]:
    """Yield the rows of each case; all are of one encoder."""
    with TemporaryDirectory(prefix="varlen-bench-") as scratch:
        folder = Path(scratch)
        save_random_checkpoint(cases[0].encoder, folder, POSITIONS)
        for case in cases:
            answers = _answers(case, folder, settings, say)
            yield rows.case_rows(case, settings.device, answers)


def measure_server(order: Soak, say: Say) -> list[Row]:
    """Return the rows of the served model."""
    say(f"{order.requests:,} requests to a server with {order.model}")
    try:
        return rows.soak_rows(order, soak(order))
    except (ServerError, RuntimeError, OSError) as error:
        return [rows.failed_soak(order, str(error).splitlines()[0])]


def _answers(case: Case, folder: Path, settings: Settings, say: Say) -> dict[str, dict[str, Any]]:
    """Return the figures of all workers of a case; one that fails gives its reason."""

    def order(task: Literal["memory", "speed"], name: Name) -> dict[str, Any]:
        say(f"{case.encoder.name}, {case.batch} a request: {task} of {name}")
        run = case.every(_NO_ARENA_STEP) if name == NO_ARENA else case
        wanted = Order(task, name, str(folder), run.to_json(), settings.device, settings.threads)
        try:
            return ask(wanted)
        except WorkerError as error:
            return {"error": str(error)}

    systems: tuple[Name, ...] = (OURS, NO_ARENA, PEER)
    return {name: order("memory", name) for name in systems} | {"speed": order("speed", OURS)}
