"""The process of a system that embeds: calibration, vectors, and timed passes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

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

_Engine = TypeVar("_Engine")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Workload:
    """Token ids of sequences in order of arrival.

    Attributes:
        batch_sizes, batch_tokens: batch sizes to try, in sequences or tokens.
        times: number of runs of a measured pass.
        outputs: tasks of a model with several outputs whose outputs are asked for.
    """

    name: str
    sequences: list[list[int]]
    batch_sizes: Sequence[int]
    batch_tokens: Sequence[int]
    times: int = 1
    outputs: Sequence[str] = ()

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


class BatchWorker(ABC, Generic[_Engine, _Answer]):
    """An engine, its workloads, and its batch size on each."""

    def __init__(self, system: System, load: Callable[[], _Engine], instances: int = 1) -> None:
        self._system = system
        self._load = load
        self.engine = load()
        self._callers = ThreadPoolExecutor(instances)
        self.workloads: dict[str, Workload] = {}
        self.sizes: dict[str, int] = {}

    @abstractmethod
    def answer(self, workload: Workload, batch: list[list[int]]) -> _Answer:
        """Return the answer of the engine to a batch."""

    @abstractmethod
    def answer_all(self, name: str) -> object:
        """Return the answers to a whole workload, in order of arrival."""

    @abstractmethod
    def vectors(self, name: str) -> Vectors:
        """Return the vectors of a whole workload that are compared, in order of arrival."""

    def calibrate_all(self, workloads: list[Workload]) -> Message:
        """Return the batch size of each workload, its label, and tokens/s of each candidate."""
        self.workloads = {workload.name: workload for workload in workloads}
        calibrations = {name: self.calibrate(name) for name in self.workloads}
        if any(calibrations.values()):
            # a fresh engine: the old one holds memory that larger candidates needed
            self.engine = self._load()
        batchings = {name: self._label(size) for name, size in self.sizes.items()}
        return {"calibration": calibrations, "batching": batchings, "sizes": self.sizes}

    def prepare(self, workloads: list[Workload], sizes: dict[str, int], folder: Path) -> Message:
        """Warm up and save the vectors of each workload.

        Args:
            sizes: batch sizes by workload, of systems that were calibrated.
        """
        self.workloads = {workload.name: workload for workload in workloads}
        self.sizes = dict.fromkeys(self.workloads, self._system.size) | sizes
        for name in self.workloads:
            np.save(folder / f"{name}.npy", self.vectors(name))
        return {}

    def measure(self, name: str) -> Message:
        """Time one pass over a workload, or the mean of several."""
        times = self.workloads[name].times
        reset_peak()
        began = time.perf_counter()
        for _ in range(times):
            self.answer_all(name)
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
                    speeds[size] = max(self._speed(workload, batches), speeds[size])
        self.sizes[name] = max(sizes, key=speeds.__getitem__)
        return {self._label(size): speed for size, speed in speeds.items() if speed}

    def answers(self, name: str) -> Iterator[tuple[list[int], _Answer]]:
        """Yield the requests of each batch of a workload, and the answer to it."""
        workload = self.workloads[name]
        batches = self._system.split(workload.sequences, self.sizes[name])
        yield from zip(
            batches,
            self._run(workload, [[workload.sequences[i] for i in batch] for batch in batches]),
            strict=True,
        )

    def _run(self, workload: Workload, batches: Sequence[list[list[int]]]) -> list[_Answer]:
        """Answer batches in their order, as many at the same time as there are instances."""
        return list(self._callers.map(partial(self.answer, workload), batches))

    def _label(self, size: int) -> str:
        """Return the batching of this size, such as "8 sequences"."""
        return f"{size} {self._system.unit}" if size else "whole"

    def _sample(self, sequences: list[list[int]], size: int) -> list[list[list[int]]]:
        """Return every sixth batch."""
        batches = self._system.split(sequences, size)
        step = min(_CALIBRATION_STEP, len(batches))
        return [[sequences[i] for i in batch] for batch in batches[step // 2 :: step]]

    def _speed(self, workload: Workload, batches: list[list[list[int]]]) -> float:
        began = time.perf_counter()
        self._run(workload, batches)
        seconds = time.perf_counter() - began
        return sum(len(sequence) for batch in batches for sequence in batch) / seconds


class EncoderWorker(BatchWorker[Embed, Vectors]):
    """An engine that embeds."""

    def answer(self, workload: Workload, batch: list[list[int]]) -> Vectors:  # noqa: ARG002  # all are equal
        """Return the vectors of a batch."""
        return self.engine(batch)

    def answer_all(self, name: str) -> Vectors:
        """Return the vectors of a whole workload, in order of arrival."""
        found = list(self.answers(name))
        width = found[0][1].shape[1]
        out = np.empty((len(self.workloads[name].sequences), width), dtype=np.float32)
        for batch, rows in found:
            out[batch] = rows
        return out

    vectors = answer_all


def handler(
    worker: BatchWorker[_Engine, _Answer], argument: Message
) -> Callable[[Message], Message]:
    """Return the function that answers the orders of a worker."""

    def handle(order: Message) -> Message:
        if order["do"] == "measure":
            return worker.measure(order["workload"])
        workloads = [Workload(**workload) for workload in order["workloads"]]
        if order["do"] == "calibrate":
            return worker.calibrate_all(workloads)
        return worker.prepare(workloads, order["sizes"], Path(argument["scratch"]))

    return handle


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
    return handler(EncoderWorker(system, load, cores.instances), argument)


if __name__ == "__main__":
    run_worker(start)
