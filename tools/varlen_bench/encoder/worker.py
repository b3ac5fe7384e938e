"""The worker process of one system: it calibrates, saves its vectors, and times passes over a workload."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from varlen_bench.encoder.systems import Batching, System, split
from varlen_bench.encoder.workload import Workload
from varlen_bench.harness.accuracy import Vectors
from varlen_bench.harness.resident import peak_resident_bytes, reset_peak
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.peers import engines
from varlen_bench.peers.engines import Embed

# Each candidate size is timed on every sixth batch, three times; its best pass counts.
_CALIBRATION_STEP = 6
_CALIBRATION_PASSES = 3
_MIB = 1 << 20


class Worker:
    """An engine, its workloads, and the best batching of each."""

    def __init__(self, system: System, load: Callable[[], Embed]) -> None:
        self._system = system
        self._load = load
        self._embed = load()
        self.workloads: dict[str, Workload] = {}
        self.batchings: dict[str, Batching] = {}

    def prepare(self, workloads: list[Workload], folder: Path) -> Message:
        """Calibrate, warm up, and save the vectors of each workload."""
        self.workloads = {workload.name: workload for workload in workloads}
        calibrations = {name: self.calibrate(name) for name in self.workloads}
        if any(calibrations.values()):
            # a fresh engine: the old one holds memory that larger candidates needed
            self._embed = self._load()
        for name in self.workloads:
            np.save(folder / f"{name}.npy", self.embed_all(name))
        batchings = {name: str(batching) for name, batching in self.batchings.items()}
        return {"calibration": calibrations, "batching": batchings}

    def measure(self, name: str) -> Message:
        """Time one pass over a workload."""
        reset_peak()
        began = time.perf_counter()
        self.embed_all(name)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "peak_rss_mib": peak_resident_bytes() / _MIB}

    def calibrate(self, name: str) -> dict[str, float]:
        """Choose the batching of a workload; return tokens/s of each candidate.

        Candidates are timed in turn, so that a drift of the machine affects all of them.
        """
        workload = self.workloads[name]
        candidates = self._system.batchings(workload)
        speeds: dict[str, float] = {}
        if len(candidates) > 1:
            samples = {str(b): self._sample(workload.sequences, b) for b in candidates}
            for _ in range(_CALIBRATION_PASSES):
                for text, batches in samples.items():
                    speeds[text] = max(self._speed(batches), speeds.get(text, 0.0))
        self.batchings[name] = max(candidates, key=lambda b: speeds.get(str(b), 0.0))
        return speeds

    def embed_all(self, name: str) -> Vectors:
        """Return the vectors of a whole workload, in order of arrival."""
        sequences = self.workloads[name].sequences
        batching = self.batchings[name]
        if batching.kind == "whole":
            return self._embed(sequences)
        batches = self._split(sequences, batching)
        vectors = [self._embed([sequences[i] for i in batch]) for batch in batches]
        out = np.empty((len(sequences), vectors[0].shape[1]), dtype=np.float32)
        for batch, rows in zip(batches, vectors, strict=True):
            out[batch] = rows
        return out

    def _split(self, sequences: list[list[int]], batching: Batching) -> list[list[int]]:
        return split([len(sequence) for sequence in sequences], self._system.order, batching)

    def _sample(self, sequences: list[list[int]], batching: Batching) -> list[list[list[int]]]:
        """Return every sixth batch."""
        batches = self._split(sequences, batching)
        step = min(_CALIBRATION_STEP, len(batches))
        return [[sequences[i] for i in batch] for batch in batches[step // 2 :: step]]

    def _speed(self, batches: list[list[list[int]]]) -> float:
        began = time.perf_counter()
        for batch in batches:
            self._embed(batch)
        seconds = time.perf_counter() - began
        return sum(len(sequence) for batch in batches for sequence in batch) / seconds


def start(argument: Message) -> Callable[[Message], Message]:
    """Load a system; return the function that answers its orders."""
    system = System(**argument["system"])
    model, checkpoint = Path(argument["model"]), Path(argument["checkpoint"])

    def load() -> Embed:
        threads = argument["threads"]
        return engines.load(system.engine, model, checkpoint, system.precision, threads=threads)

    worker = Worker(system, load)

    def handle(order: Message) -> Message:
        if "measure" in order:
            return worker.measure(order["measure"])
        workloads = [Workload(**workload) for workload in order["workloads"]]
        return worker.prepare(workloads, Path(order["prepare"]))

    return handle


if __name__ == "__main__":
    run_worker(start)
