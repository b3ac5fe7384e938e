"""The process of a system that embeds: calibration, vectors, and timed passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from varlen_bench.compare.systems import System
from varlen_bench.harness.accuracy import Vectors
from varlen_bench.harness.resident import MIB, peak_resident_bytes, reset_peak
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.peers import engines
from varlen_bench.peers.engines import Cores, Embed

# Each candidate size is timed on every sixth batch, three times; its best pass counts.
_CALIBRATION_STEP = 6
_CALIBRATION_PASSES = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """Token ids of sequences in order of arrival.

    Attributes:
        batch_sizes, batch_tokens: batch sizes to try, in sequences or tokens.
        times: number of runs of a measured pass.
    """

    name: str
    sequences: list[list[int]]
    batch_sizes: Sequence[int]
    batch_tokens: Sequence[int]
    times: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return sum(map(len, self.sequences))

    def thinned(self, step: int) -> tuple[Workload, list[int]]:
        """Return every `step`-th sequence by length, in order of arrival, and their indices."""
        by_length = sorted(range(len(self.sequences)), key=lambda i: len(self.sequences[i]))
        kept = sorted(by_length[step // 2 :: step] or by_length[:1])
        return replace(self, sequences=[self.sequences[i] for i in kept]), kept

    def with_fewer_sizes(self) -> Workload:
        """Return the same sequences with every second batch size."""
        return replace(
            self, batch_sizes=self.batch_sizes[1::2], batch_tokens=self.batch_tokens[1::2]
        )


class EncoderWorker:
    """An engine, its workloads, and its batch size on each."""

    def __init__(self, system: System, load: Callable[[], Embed], instances: int = 1) -> None:
        self._system = system
        self._load = load
        self._embed = load()
        self._callers = ThreadPoolExecutor(instances)
        self.workloads: dict[str, Workload] = {}
        self.sizes: dict[str, int] = {}

    def prepare(self, workloads: list[Workload], folder: Path) -> Message:
        """Calibrate, warm up, and save the vectors of each workload."""
        self.workloads = {workload.name: workload for workload in workloads}
        calibrations = {name: self.calibrate(name) for name in self.workloads}
        if any(calibrations.values()):
            # a fresh engine: the old one holds memory that larger candidates needed
            self._embed = self._load()
        for name in self.workloads:
            np.save(folder / f"{name}.npy", self.embed_all(name))
        batchings = {name: self._label(size) for name, size in self.sizes.items()}
        return {"calibration": calibrations, "batching": batchings}

    def measure(self, name: str) -> Message:
        """Time one pass over a workload, or the mean of several."""
        times = self.workloads[name].times
        reset_peak()
        began = time.perf_counter()
        for _ in range(times):
            self.embed_all(name)
        seconds = (time.perf_counter() - began) / times
        return {"seconds": seconds, "peak_rss_mib": peak_resident_bytes() / MIB}

    def calibrate(self, name: str) -> dict[str, float]:
        """Choose the batch size of a workload; return tokens/s of each candidate.

        Candidates are timed in turn, so that a drift of the machine affects all of them.
        """
        workload = self.workloads[name]
        sizes: Sequence[int] = [self._system.size]
        if self._system.batching != "engine" and not self._system.size:
            is_tokens = self._system.unit == "tokens"
            sizes = workload.batch_tokens if is_tokens else workload.batch_sizes
        speeds = dict.fromkeys(sizes, 0.0)
        if len(sizes) > 1:
            samples = {size: self._sample(workload.sequences, size) for size in sizes}
            for _ in range(_CALIBRATION_PASSES):
                for size, batches in samples.items():
                    speeds[size] = max(self._speed(batches), speeds[size])
        self.sizes[name] = max(sizes, key=speeds.__getitem__)
        return {self._label(size): speed for size, speed in speeds.items() if speed}

    def embed_all(self, name: str) -> Vectors:
        """Return the vectors of a whole workload, in order of arrival."""
        sequences = self.workloads[name].sequences
        batches = self._system.split(sequences, self.sizes[name])
        vectors = self._run([[sequences[i] for i in batch] for batch in batches])
        out = np.empty((len(sequences), vectors[0].shape[1]), dtype=np.float32)
        for batch, rows in zip(batches, vectors, strict=True):
            out[batch] = rows
        return out

    def _run(self, batches: Sequence[list[list[int]]]) -> list[Vectors]:
        """Embed batches in their order, as many at the same time as there are instances."""
        return list(self._callers.map(self._embed, batches))

    def _label(self, size: int) -> str:
        """Return the batching of this size, such as "8 sequences"."""
        return f"{size} {self._system.unit}" if size else "whole"

    def _sample(self, sequences: list[list[int]], size: int) -> list[list[list[int]]]:
        """Return every sixth batch."""
        batches = self._system.split(sequences, size)
        step = min(_CALIBRATION_STEP, len(batches))
        return [[sequences[i] for i in batch] for batch in batches[step // 2 :: step]]

    def _speed(self, batches: list[list[list[int]]]) -> float:
        began = time.perf_counter()
        self._run(batches)
        seconds = time.perf_counter() - began
        return sum(len(sequence) for batch in batches for sequence in batch) / seconds


def start(argument: Message) -> Callable[[Message], Message]:
    """Load a system; return the function that answers its orders."""
    system, cores = System(**argument["system"]), Cores(**argument["cores"])
    load = partial(
        engines.load,
        system.engine,
        Path(argument["checkpoint"]),
        system.precision,
        cores=cores,
        pooling=argument["pooling"],
    )
    worker = EncoderWorker(system, load, cores.instances)

    def handle(order: Message) -> Message:
        if order["do"] == "measure":
            return worker.measure(order["workload"])
        workloads = [Workload(**workload) for workload in order["workloads"]]
        return worker.prepare(workloads, Path(argument["scratch"]))

    return handle


if __name__ == "__main__":
    run_worker(start)
