"""The worker process of one system: batch size, timed passes, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from varlen_bench.beam import engines
from varlen_bench.beam.drive import Answer, drive_batches, drive_iterations, figures
from varlen_bench.beam.systems import REFERENCE
from varlen_bench.beam.workload import Workload
from varlen_bench.harness.generating import SIZES, System
from varlen_bench.harness.machine import gflops
from varlen_bench.harness.worker import Message, run_worker

# Smallest number of requests that a batch size is timed on.
_CALIBRATION_REQUESTS = 4


class Worker:
    """A loaded engine and its batch size."""

    def __init__(self, system: System, answer: Callable[[Workload, int], list[Answer]]) -> None:
        self._system, self._answer = system, answer
        self._size = 1 if system == REFERENCE else 0

    def calibrate(self, workload: Workload) -> Message:
        """Choose the batch size; return sentences/s of each candidate. This also warms the engine up."""
        self._speed(workload, 1)
        if self._system.batching == "iteration":
            self._speed(workload, len(workload.sources))
            return {"size": 0, "calibration": {}}
        sizes = [size for size in SIZES if size <= len(workload.sources)]
        speeds = {size: self._speed(workload, size) for size in sizes}
        self._size = max(sizes, key=speeds.__getitem__)
        return {"size": self._size, "calibration": speeds}

    def measure(self, workload: Workload) -> Message:
        """Return the figures and the answers of one pass over a workload."""
        speed = gflops()
        answers = self._answer(workload, self._size)
        return {
            "figures": {**figures(answers), "machine_gflops": speed},
            "answers": [answer.tokens for answer in answers],
        }

    def _speed(self, workload: Workload, size: int) -> float:
        """Return the sentences/s of the requests of middle length: one batch, at least four requests."""
        order = sorted(
            range(len(workload.sources)), key=lambda request: -len(workload.sources[request])
        )
        count = max(size, min(_CALIBRATION_REQUESTS, len(order)))
        begin = (len(order) - count) // 2
        part = workload.part(order[begin : begin + count])
        began = time.perf_counter()
        self._answer(part, size)
        return count / (time.perf_counter() - began)


def start(argument: Message) -> Callable[[Message], Message]:
    """Load a system; return the function that answers its orders."""
    system, checkpoint = System(**argument["system"]), Path(argument["checkpoint"])
    threads = argument["threads"]
    if system.batching == "iteration":
        submit = engines.load_iteration(checkpoint, threads=threads)
        worker = Worker(system, lambda workload, _: drive_iterations(submit, workload))
    else:
        run = engines.load_batches(system, checkpoint, Path(argument["scratch"]), threads=threads)
        worker = Worker(system, lambda load, size: drive_batches(run, load, system, size))
    orders = {"calibrate": worker.calibrate, "measure": worker.measure}

    def handle(order: Message) -> Message:
        return orders[order["do"]](Workload(**order["workload"]))

    return handle


if __name__ == "__main__":
    run_worker(start)
