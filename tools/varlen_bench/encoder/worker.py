"""One system in a process of its own: reads orders as JSON lines, answers each with one JSON line.

Orders: {"do": "prepare"} calibrates, warms up and writes the vectors for the quality check;
{"do": "measure", "workload": name} times one pass. The first line written says that it is loaded.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from varlen_bench.encoder.systems import Batching, System, split, system
from varlen_bench.encoder.workload import Workload
from varlen_bench.harness.accuracy import Vectors
from varlen_bench.peers import engines
from varlen_bench.peers.engines import Embed

_CALIBRATION_SHARE = 6  # one batch in so many is timed for each candidate size
_CALIBRATION_PASSES = 3  # over all sizes in turn; each size's best counts


@dataclass(slots=True)
class Worker:
    """An engine, its workloads, and the batching it found best for each."""

    system: System
    embed: Embed
    workloads: dict[str, Workload]
    batchings: dict[str, Batching]

    def calibrate(self, name: str) -> dict[str, float]:
        """Choose the batching for a workload; return tokens/s of each candidate, its best pass.

        Candidates take turns, so that a drift of the machine meets all of them.
        """
        workload = self.workloads[name]
        candidates = self.system.candidates(workload)
        speeds: dict[str, float] = {}
        if len(candidates) > 1:
            samples = {batching: self._sample(workload, batching) for batching in candidates}
            for _ in range(_CALIBRATION_PASSES):
                for batching, batches in samples.items():
                    speed = self._speed(batches)
                    speeds[str(batching)] = max(speed, speeds.get(str(batching), 0.0))
        self.batchings[name] = max(candidates, key=lambda b: speeds.get(str(b), 0.0))
        return speeds

    def run(self, name: str) -> Vectors:
        """Return the vectors of a whole workload, in order of arrival."""
        sequences = self.workloads[name].sequences
        lengths = [len(sequence) for sequence in sequences]
        batches = split(lengths, self.system.order, self.batchings[name])
        if len(batches) == 1 and self.batchings[name].kind == "whole":
            return self.embed(sequences)
        out: Vectors | None = None
        for batch in batches:
            vectors = self.embed([sequences[i] for i in batch])
            if out is None:
                out = np.empty((len(sequences), vectors.shape[1]), dtype=np.float32)
            out[batch] = vectors
        assert out is not None
        return out

    def _sample(self, workload: Workload, batching: Batching) -> list[list[list[int]]]:
        """Return an even share of the batches that a batching makes of a workload."""
        lengths = [len(sequence) for sequence in workload.sequences]
        batches = split(lengths, self.system.order, batching)
        step = min(_CALIBRATION_SHARE, len(batches))
        return [[workload.sequences[i] for i in batch] for batch in batches[step // 2 :: step]]

    def _speed(self, batches: list[list[list[int]]]) -> float:
        begin = time.perf_counter()
        for batch in batches:
            self.embed(batch)
        seconds = time.perf_counter() - begin
        return sum(len(sequence) for batch in batches for sequence in batch) / seconds


def serve(spec: dict[str, Any], orders: IO[str], answers: IO[str]) -> None:
    """Answer orders until their stream ends."""

    def load() -> Embed:
        return engines.load(
            worker_system.engine,
            Path(spec["model"]),
            Path(spec["checkpoint"]),
            worker_system.precision,
            threads=spec["threads"],
        )

    def answer(**figures: object) -> None:
        print(json.dumps(figures), file=answers, flush=True)

    worker_system = system(spec["system"])
    worker = Worker(worker_system, load(), _workloads(Path(spec["workloads"])), {})
    answer(ready=True)
    for line in orders:
        order = json.loads(line)
        if order["do"] == "prepare":
            calibration = {name: worker.calibrate(name) for name in worker.workloads}
            if any(calibration.values()):
                # A fresh engine, so that arenas grown by larger candidates are not held.
                worker.embed = load()
            for name in worker.workloads:
                np.save(Path(spec["vectors"]) / f"{name}.npy", worker.run(name))
            batching = {name: str(chosen) for name, chosen in worker.batchings.items()}
            answer(calibration=calibration, batching=batching)
        else:
            _forget_peak()
            begin = time.perf_counter()
            worker.run(order["workload"])
            seconds = time.perf_counter() - begin
            answer(seconds=seconds, peak_rss_mib=_peak_rss_mib())


def _workloads(path: Path) -> dict[str, Workload]:
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return {
        w["name"]: Workload(
            w["name"], w["sequences"], tuple(w["batch_sizes"]), tuple(w["batch_tokens"])
        )
        for w in loaded
    }


def _forget_peak() -> None:
    """Let the kernel count peak memory from now; without that right, it counts from the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def _peak_rss_mib() -> float:
    # ru_maxrss would include what the parent held when it started this process.
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    # Libraries print to stdout: keep the pipe for answers and send the rest to stderr.
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), sys.stdin, _answers)
