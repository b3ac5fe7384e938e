"""The worker process of a system that generates: batch size and timed passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from varlen_bench.compare.passes import (
    Answer,
    Requests,
    RunBatch,
    Submit,
    Unit,
    drive_batches,
    drive_iterations,
)
from varlen_bench.compare.systems import System
from varlen_bench.harness.machine import gflops
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.worker import Message
from varlen_bench.peers.engines import Cores

# Batch sizes to try, and the smallest number of requests that one is timed on.
_SIZES, _CALIBRATION_REQUESTS = (1, 4, 8, 16, 32), 4

# Answers requests in batches of a size; an engine that batches requests itself ignores the size.
AnswerAll: TypeAlias = Callable[[Requests, int], list[Answer]]
# Returns the figures of a pass.
Figures: TypeAlias = Callable[[Sequence[Answer], Requests], dict[str, Cell]]


@runtime_checkable
class Counted(Protocol):
    """An engine that counts what it does."""

    def counts(self) -> dict[str, int]:
        """Return totals so far, by the names of their figures."""
        ...


class Worker:
    """A loaded engine and its batch size."""

    def __init__(
        self,
        system: System,
        answer: AnswerAll,
        figures: Figures,
        unit: Unit,
        *,
        instances: int = 1,
        counts: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._system, self._answer, self._counts = system, answer, counts
        self._figures, self._unit = figures, unit
        self._size = system.size
        self._instances = instances

    def warm_up(self, requests: Requests) -> Message:
        """Answer some requests one by one, or all if the engine batches them."""
        is_engine = self._system.batching == "engine"
        self._speed(requests, len(requests) if is_engine else 1)
        return {}

    def calibrate(self, requests: Requests) -> Message:
        """Choose the batch size; return the speed of each candidate."""
        if self._system.batching == "engine":
            return {"size": None, "calibration": {}}
        sizes = [size for size in _SIZES if size * self._instances <= len(requests)]
        speeds = {size: self._speed(requests, size) for size in sizes}
        self._size = max(sizes, key=speeds.__getitem__)
        return {"size": self._size, "calibration": speeds}

    def measure(self, requests: Requests) -> Message:
        """Return the figures and the answers of one pass."""
        before = self._counts()
        answers = self._answer(requests, self._size or len(requests))
        counted = {name: total - before[name] for name, total in self._counts().items()}
        figures = {**self._figures(answers, requests), **counted, "machine_gflops": gflops()}
        return {
            "figures": figures,
            "answers": [answer.tokens for answer in answers],
        }

    def _speed(self, requests: Requests, size: int) -> float:
        """Return the speed on the middle of the requests.

        It takes a batch for each instance, and at least four requests.
        """
        order = self._system.ordered(range(len(requests)), requests.prompts)
        count = max(size * self._instances, min(_CALIBRATION_REQUESTS, len(order)))
        begin = (len(order) - count) // 2
        part = requests.part(order[begin : begin + count])
        began = time.perf_counter()
        self._answer(part, size)
        return part.work(self._unit) / (time.perf_counter() - began)


def starter(
    load_iteration: Callable[[System, Path, Cores], Submit],
    load_batches: Callable[[System, Path, Path, Cores], RunBatch],
    figures: Figures,
    unit: Unit,
) -> Callable[[Message], Callable[[Message], Message]]:
    """Return the function that loads a system, and returns the function that answers its orders.

    Args:
        load_iteration: loads an engine that batches requests itself: system, checkpoint, cores.
        load_batches: loads one that runs batches to their end: system, checkpoint, scratch folder, cores.
    """

    def start(argument: Message) -> Callable[[Message], Message]:
        system, checkpoint = System(**argument["system"]), Path(argument["checkpoint"])
        cores = Cores(**argument["cores"])
        if system.batching == "engine":
            submit = load_iteration(system, checkpoint, cores)
            worker = Worker(
                system,
                lambda load, _: drive_iterations(submit, load),
                figures,
                unit,
                counts=submit.counts if isinstance(submit, Counted) else dict,
            )
        else:
            run = load_batches(system, checkpoint, Path(argument["scratch"]), cores)

            def drive(load: Requests, size: int) -> list[Answer]:
                return drive_batches(run, load, system, size, instances=cores.instances)

            worker = Worker(system, drive, figures, unit, instances=cores.instances)
        orders = {
            "warm up": worker.warm_up,
            "calibrate": worker.calibrate,
            "measure": worker.measure,
        }
        return lambda order: orders[order["do"]](Requests(**order["requests"]))

    return start
