"""The order of a run: reference vectors, preparation of each system, rounds in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from varlen_bench.compare.systems import REFERENCE, System
from varlen_bench.compare.turns import measure_in_turns, running, start_system
from varlen_bench.encoder.report import EncoderResult
from varlen_bench.encoder.workload import Workload
from varlen_bench.harness.accuracy import Vectors, cosines
from varlen_bench.harness.command import Progress
from varlen_bench.harness.machine import has_native_bf16
from varlen_bench.harness.worker import Message, WorkerProcess
from varlen_bench.peers.exports import exported
from varlen_bench.peers.pooling import PoolingMode

# Emulated bf16 embeds every eighth sequence by length.
_EMULATED_STEP = 8


@dataclass(eq=False)
class EncoderComparison:
    """Systems on one model, each in its process.

    Attributes:
        pooling: pooling mode of the model and of its peers.
        scratch: folder for logs and vectors.
    """

    model: Path
    pooling: PoolingMode
    workloads: Sequence[Workload]
    scratch: Path
    report: Progress
    threads: int
    _reference: dict[str, Vectors] = field(default_factory=dict)

    def compare(self, systems: Iterable[System], rounds: int) -> list[EncoderResult]:
        """Return a result for every system and workload.

        A system that fails leaves results with the reason; the others go on.
        """
        self.report("reference vectors: transformers fp32, one sequence at a time")
        with self._start(REFERENCE) as alone:
            _ask_prepare(alone, self.workloads)
        self._reference = {each.name: self._vectors(REFERENCE, each) for each in self.workloads}
        results = [_empty(system, each) for system in systems for each in self.workloads]
        with running(results, self._start, self._prepare, self.report) as processes:

            def measure(result: EncoderResult) -> dict[str, float]:
                found = processes[result.system.name].ask(do="measure", workload=result.workload)
                peak = found["peak_rss_mib"]
                return {"tokens_per_second": result.work / found["seconds"], "peak_rss_mib": peak}

            names = [workload.name for workload in self.workloads]
            by_workload = sorted(results, key=lambda result: names.index(result.workload))
            measure_in_turns(by_workload, measure, rounds=rounds, report=self.report)
        return results

    def _start(self, system: System) -> WorkerProcess:
        checkpoint = exported(self.model, system.engine, system.precision, self.pooling)
        module, more = "varlen_bench.encoder.worker", {"pooling": self.pooling}
        return start_system(module, system, checkpoint, self.scratch, threads=self.threads, **more)

    def _prepare(self, process: WorkerProcess, results: Sequence[EncoderResult]) -> None:
        """Calibrate a system and compare its vectors."""
        parts = [_part(results[0].system, workload) for workload in self.workloads]
        answer = _ask_prepare(process, [part for part, _ in parts])
        for result, (part, kept) in zip(results, parts, strict=True):
            result.batch = answer["batching"][part.name]
            speeds = answer["calibration"][part.name].items()
            result.calibration = "; ".join(f"{size}: {speed:.0f}" for size, speed in speeds)
            found = cosines(self._vectors(result.system, part), self._reference[part.name][kept])
            result.cosine_mean, result.cosine_min = float(found.mean()), float(found.min())

    def _vectors(self, system: System, workload: Workload) -> Vectors:
        vectors: Vectors = np.load(self.scratch / system.name / f"{workload.name}.npy")
        return vectors


def _ask_prepare(process: WorkerProcess, workloads: Iterable[Workload]) -> Message:
    return process.ask(do="prepare", workloads=[asdict(workload) for workload in workloads])


def _part(system: System, workload: Workload) -> tuple[Workload, list[int]]:
    """Return the part of a workload that a system embeds, and its indices."""
    is_emulated = system.precision == "bf16" and not has_native_bf16()
    return workload.thinned(_EMULATED_STEP if is_emulated else 1)


def _empty(system: System, workload: Workload) -> EncoderResult:
    part, kept = _part(system, workload)
    result = EncoderResult(
        system=system, workload=part.name, requests=len(kept), work=part.num_tokens
    )
    if len(kept) < len(workload.sequences):
        counts = f"{len(kept)} of {len(workload.sequences)} sequences"
        result.note = f"no bf16 instructions on this CPU: {counts}"
    return result
