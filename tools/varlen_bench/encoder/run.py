"""The order of events: reference vectors, systems prepared one by one, rounds in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from varlen_bench.encoder.process import WorkerError, WorkerProcess
from varlen_bench.encoder.report import Result, cosines
from varlen_bench.encoder.systems import REFERENCE, SYSTEMS, System
from varlen_bench.encoder.workload import Workload, every_kth_by_length
from varlen_bench.peers.exports import exported

EMULATED_STEP = 8  # emulated bf16 embeds one sequence in so many

_PAUSE_SECONDS = 0.2  # lets the last system's threads stop spinning
_START_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. cache: folder for the peers' formats of the model."""

    model: Path
    cache: Path
    threads: int
    rounds: int
    systems: tuple[System, ...]
    timeout_seconds: float = 600.0


@dataclass(slots=True)
class _Running:
    system: System
    process: WorkerProcess
    folder: Path
    results: dict[str, Result]
    kept: dict[str, list[int]]  # indices of the sequences that it embeds


def run(
    settings: Settings, workloads: Sequence[Workload], say: Callable[[str], None]
) -> list[Result]:
    """Return a result for every system and workload, in the order of `settings.systems`.

    A system that fails has its results marked and leaves the others alone.
    """
    by_system: dict[str, dict[str, Result]] = {
        s.name: {w.name: Result(s, w.name) for w in workloads} for s in settings.systems
    }
    with TemporaryDirectory(prefix="varlen-bench-") as scratch, ExitStack() as stack:
        say("reference vectors: transformers fp32, one sequence at a time")
        reference = _reference(settings, workloads, Path(scratch))
        running: list[_Running] = []
        # Loading is one thread's work: start the next system while the last one loads.
        waiting: list[_Running] = []
        for s in settings.systems:
            say(f"load {s.name}")
            started = _start(settings, s, workloads, Path(scratch), by_system[s.name])
            if started is None:
                continue
            stack.callback(started.process.close)
            waiting.append(started)
            running.append(started)
            if len(waiting) == _START_AT_ONCE:
                _await_ready(waiting.pop(0))
        for r in waiting:
            _await_ready(r)
        for r in _alive(running):
            say(f"prepare {r.system.name}")
            _prepare(r, reference)
        for results in by_system.values():
            failed = next((result for result in results.values() if result.failed), None)
            if failed:
                say(f"{failed.system.name} {failed.note}")
        for number in range(settings.rounds):
            for workload in workloads:
                say(f"round {number + 1} of {settings.rounds}, {workload.name}")
                for r in _alive(running):
                    _measure(r, workload.name)
    return [result for results in by_system.values() for result in results.values()]


def bf16_is_native() -> bool:
    """Return whether this CPU multiplies bf16 by itself."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def _start(
    settings: Settings,
    system: System,
    workloads: Sequence[Workload],
    scratch: Path,
    results: dict[str, Result],
) -> _Running | None:
    emulated = system.precision == "bf16" and not bf16_is_native()
    kept = {
        w.name: every_kth_by_length(w.sequences, EMULATED_STEP)
        if emulated
        else list(range(len(w.sequences)))
        for w in workloads
    }
    own = [replace(w, sequences=[w.sequences[i] for i in kept[w.name]]) for w in workloads]
    for w, whole in zip(own, workloads, strict=True):
        results[w.name].sequences = len(w.sequences)
        results[w.name].tokens = w.num_tokens
        if emulated:
            part = f"{len(w.sequences)} of {len(whole.sequences)} sequences"
            results[w.name].note = f"bf16 is emulated on this CPU: {part}"
    try:
        checkpoint = exported(settings.model, system.engine, system.precision, settings.cache)
    except RuntimeError as error:
        _fail(results, str(error))
        return None
    folder = scratch / system.name
    process = _worker(settings, system.name, checkpoint, own, folder)
    return _Running(system, process, folder, results, kept)


def _worker(
    settings: Settings, system: str, checkpoint: Path, workloads: Sequence[Workload], folder: Path
) -> WorkerProcess:
    folder.mkdir()
    path = folder / "workloads.json"
    path.write_text(json.dumps([asdict(w) for w in workloads]), encoding="utf-8")
    spec = {
        "system": system,
        "model": str(settings.model),
        "checkpoint": str(checkpoint),
        "threads": settings.threads,
        "workloads": str(path),
        "vectors": str(folder),
    }
    return WorkerProcess(spec, folder / "log", timeout_seconds=settings.timeout_seconds)


def _reference(
    settings: Settings, workloads: Sequence[Workload], scratch: Path
) -> dict[str, npt.NDArray[np.float32]]:
    folder = scratch / REFERENCE.name
    process = _worker(settings, REFERENCE.name, settings.model, workloads, folder)
    try:
        process.answer()
        process.ask(do="prepare")
    finally:
        process.close()
    return {w.name: np.load(folder / f"{w.name}.npy") for w in workloads}


def _await_ready(running: _Running) -> None:
    try:
        running.process.answer()
    except WorkerError as error:
        _fail(running.results, str(error))


def _prepare(running: _Running, reference: dict[str, npt.NDArray[np.float32]]) -> None:
    try:
        answer = running.process.ask(do="prepare")
        for name, result in running.results.items():
            result.batching = answer["batching"][name]
            result.calibration = answer["calibration"][name]
            vectors = np.load(running.folder / f"{name}.npy")
            result.cosines = cosines(vectors, reference[name][running.kept[name]])
    except (WorkerError, ValueError) as error:
        _fail(running.results, str(error))


def _measure(running: _Running, workload: str) -> None:
    result = running.results[workload]
    time.sleep(_PAUSE_SECONDS)
    try:
        answer = running.process.ask(do="measure", workload=workload)
    except WorkerError as error:
        _fail(running.results, str(error))
        return
    result.speeds.append(result.tokens / answer["seconds"])
    result.peak_rss_mib = max(result.peak_rss_mib, answer["peak_rss_mib"])


def _alive(running: Sequence[_Running]) -> Iterator[_Running]:
    return (r for r in running if not any(result.failed for result in r.results.values()))


def _fail(results: dict[str, Result], reason: str) -> None:
    shown = reason.replace(str(Path.home()), "~")
    for result in results.values():
        result.failed = True
        result.note = f"did not run: {shown}"


def chosen_systems(names: str) -> tuple[System, ...]:
    """Return the systems whose name starts with one of the comma-separated `names`.

    Raises:
        ValueError: a name fits none.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(s.name.startswith(name) for s in SYSTEMS):
            raise ValueError(f"no system's name starts with {name!r}: {[s.name for s in SYSTEMS]}")
    return tuple(s for s in SYSTEMS if not wanted or any(s.name.startswith(w) for w in wanted))
