"""The worker process of one system: batch size, checked tokens, and timed passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from varlen_bench.generate import engines
from varlen_bench.generate.drive import Answer, drive_batches, drive_iterations, figures
from varlen_bench.generate.systems import REFERENCE
from varlen_bench.generate.workload import Workload
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

    def check(self, workload: Workload) -> Message:
        """Return the tokens of each request; this also warms the engine up."""
        answers = self._answer(workload, self._size or len(workload.prompts))
        return {"tokens": [answer.tokens for answer in answers]}

    def calibrate(self, workload: Workload) -> Message:
        """Choose the batch size; return tokens/s of each candidate."""
        if self._system.batching == "iteration":
            return {"size": 0, "calibration": {}}
        sizes = [size for size in SIZES if size <= len(workload.prompts)]
        speeds = {size: self._speed(workload, size) for size in sizes}
        self._size = max(sizes, key=speeds.__getitem__)
        return {"size": self._size, "calibration": speeds}

    def measure(self, workload: Workload) -> Message:
        """Return the figures of one pass over a workload."""
        speed = gflops()
        return {**figures(self._answer(workload, self._size)), "machine_gflops": speed}

    def _speed(self, workload: Workload, size: int) -> float:
        """Return the tokens/s of the middle batch, or of four requests."""
        order = self._system.next_batch(
            range(len(workload.prompts)), workload.prompts, len(workload.prompts)
        )
        count = max(size, min(_CALIBRATION_REQUESTS, len(order)))
        begin = (len(order) - count) // 2
        kept = order[begin : begin + count]
        prompts = [workload.prompts[request] for request in kept]
        outputs = [workload.outputs[request] for request in kept]
        began = time.perf_counter()
        self._answer(Workload("calibration", prompts, outputs, [0.0] * count), size)
        return sum(outputs) / (time.perf_counter() - began)


def start(argument: Message) -> Callable[[Message], Message]:
    """Load a system; return the function that answers its orders."""
    system, checkpoint = System(**argument["system"]), Path(argument["checkpoint"])
    threads = argument["threads"]
    if system.batching == "iteration":
        submit = engines.load_iteration(system, checkpoint, threads=threads)
        worker = Worker(system, lambda workload, _: drive_iterations(submit, workload))
    else:
        run = engines.load_batches(system, checkpoint, Path(argument["scratch"]), threads=threads)
        worker = Worker(system, lambda load, size: drive_batches(run, load, system, size))
    orders = {"check": worker.check, "calibrate": worker.calibrate, "measure": worker.measure}

    def handle(order: Message) -> Message:
        return orders[order["do"]](Workload(**order["workload"]))

    return handle


if __name__ == "__main__":
    run_worker(start)
