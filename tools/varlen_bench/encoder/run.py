"""The order of a run: reference vectors, preparation of each system, rounds in turn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from varlen_bench.encoder.report import Result
from varlen_bench.encoder.systems import REFERENCE, System
from varlen_bench.encoder.workload import Workload
from varlen_bench.harness.accuracy import Vectors, cosines
from varlen_bench.harness.command import Progress
from varlen_bench.harness.machine import has_native_bf16
from varlen_bench.harness.worker import WorkerError, WorkerProcess
from varlen_bench.peers.exports import exported
from varlen_bench.peers.pooling import PoolingMode

# Emulated bf16 embeds every eighth sequence by length.
_EMULATED_STEP = 8
# Threads of the last system stop spinning in this time.
_PAUSE_SECONDS = 0.2


def run(
    systems: Iterable[System],
    workloads: Sequence[Workload],
    report: Progress,
    *,
    model: Path,
    pooling: PoolingMode,
    threads: int,
    rounds: int,
) -> list[Result]:
    """Return a result for every system and workload.

    A system that fails leaves results with the reason; the others go on.
    """
    with TemporaryDirectory(prefix="varlen-bench-") as scratch, ExitStack() as processes:
        report("reference vectors: transformers fp32, one sequence at a time")
        alone = _MeasuredSystem(REFERENCE, workloads, Path(scratch))
        with alone.start(model, pooling, threads):
            reference = alone.prepare()
        measured = [_MeasuredSystem(system, workloads, Path(scratch)) for system in systems]
        for system in measured:
            report(f"prepare {system.name}")
            with system.failures(report):
                processes.enter_context(system.start(model, pooling, threads))
                system.prepare(reference)
        for number in range(rounds):
            for workload in workloads:
                report(f"round {number + 1} of {rounds}, {workload.name}")
                for system in measured:
                    if not system.has_failed:
                        with system.failures(report):
                            system.measure(workload.name)
    return [result for system in measured for result in system.results.values()]


class _MeasuredSystem:
    """A system in its process, and its results on each workload."""

    def __init__(self, system: System, workloads: Sequence[Workload], scratch: Path) -> None:
        self.name = system.name
        self.results: dict[str, Result] = {}
        self.has_failed = False
        self._system = system
        self._folder = scratch / system.name
        self._parts: list[Workload] = []
        self._kept: dict[str, list[int]] = {}
        is_emulated = system.precision == "bf16" and not has_native_bf16()
        for whole in workloads:
            part, kept = whole.thinned(_EMULATED_STEP if is_emulated else 1)
            result = Result(system, whole.name, len(kept), part.num_tokens)
            if is_emulated:
                counts = f"{len(kept)} of {len(whole.sequences)} sequences"
                result.note = f"bf16 is emulated on this CPU: {counts}"
            self._parts.append(part)
            self._kept[whole.name], self.results[whole.name] = kept, result

    def start(self, model: Path, pooling: PoolingMode, threads: int) -> WorkerProcess:
        """Start to load the system; return its process."""
        engine, precision = self._system.engine, self._system.precision
        argument = {
            "system": asdict(self._system),
            "checkpoint": str(exported(model, engine, precision, pooling).resolve()),
            "threads": threads,
            "pooling": pooling,
        }
        self._folder.mkdir()
        log = self._folder / "log"
        self._process = WorkerProcess("varlen_bench.encoder.worker", argument, log, threads=threads)
        return self._process

    def prepare(self, reference: dict[str, Vectors] | None = None) -> dict[str, Vectors]:
        """Calibrate the system and compare its vectors; return those of each workload."""
        workloads = [asdict(part) for part in self._parts]
        answer = self._process.ask(prepare=str(self._folder), workloads=workloads)
        vectors = {name: np.load(self._folder / f"{name}.npy") for name in self.results}
        for name, result in self.results.items():
            result.batching = answer["batching"][name]
            result.calibration = answer["calibration"][name]
            if reference:
                found = cosines(vectors[name], reference[name][self._kept[name]])
                result.cosine_mean, result.cosine_min = float(found.mean()), float(found.min())
        return vectors

    def measure(self, workload: str) -> None:
        """Time one pass over a workload."""
        time.sleep(_PAUSE_SECONDS)
        answer = self._process.ask(measure=workload)
        result = self.results[workload]
        result.speeds.append(result.tokens / answer["seconds"])
        result.peak_rss_mib = max(result.peak_rss_mib, answer["peak_rss_mib"])

    @contextmanager
    def failures(self, report: Progress) -> Iterator[None]:
        """Turn an error into failed results with its reason."""
        try:
            yield
        except (WorkerError, RuntimeError, ValueError) as error:
            self.has_failed = True
            note = f"did not run: {error}".replace(str(Path.home()), "~")
            report(f"{self.name} {note}")
            for result in self.results.values():
                result.note = note
                result.speeds.clear()
