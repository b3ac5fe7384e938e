"""What the benchmarks of systems that generate share: systems, their results, and their processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from varlen_bench.harness.worker import WorkerProcess

EngineName = Literal["varlen", "transformers", "ctranslate2"]
Precision = Literal["fp32", "bf16", "int8"]
# Requests join and leave at any step; or batches run to their end, in order of arrival or by length.
Batching = Literal["iteration", "arrival", "sorted"]
Arrivals = Literal["at once", "poisson"]

# Requests of a batch that runs to its end.
SIZES = (1, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class System:
    """An engine at a precision, and how it batches requests."""

    name: str
    engine: EngineName
    precision: Precision
    batching: Batching

    @property
    def is_ours(self) -> bool:
        """Whether it is varlen."""
        return self.engine == "varlen"

    @property
    def is_static(self) -> bool:
        """Whether it is transformers with padded batches that run to their end."""
        return self.engine == "transformers" and self.batching != "iteration"

    def next_batch(
        self, waiting: Sequence[int], inputs: Sequence[Sequence[int]], size: int
    ) -> list[int]:
        """Return the waiting requests that run next, at most `size`; sorted: the longest inputs."""
        if self.batching == "sorted":
            waiting = sorted(waiting, key=lambda request: -len(inputs[request]))
        return list(waiting[:size])


@dataclass(slots=True)
class SystemResult:
    """Figures of one system under one kind of arrivals, by round; none if it failed.

    Attributes:
        rate: requests/s of the Poisson arrivals.
        size: requests of a batch; 0 if they join at any step.
        calibration: speed of each size.
    """

    speed: ClassVar[str]
    """The figure that counts."""

    system: System
    model: str
    label: str
    arrivals: Arrivals
    requests: int
    rate: float | None = None
    size: int = 0
    calibration: str = ""
    rounds: list[dict[str, float]] = field(default_factory=list)
    note: str = ""

    @property
    def speeds(self) -> list[float]:
        """The speed in each round."""
        return [each[self.speed] for each in self.rounds]

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the rounds that have it."""
        found = [each[name] for each in self.rounds if each.get(name) is not None]
        return statistics.median(found) if found else None


class SystemProcesses:
    """Starts the worker processes of systems on one model.

    Args:
        module: of the worker.
        checkpoint: folder of the model.
        threads: cores of each process.
        scratch: folder for logs and converted checkpoints.
    """

    def __init__(self, module: str, checkpoint: Path, *, threads: int, scratch: Path) -> None:
        self._module, self._checkpoint = module, checkpoint.resolve()
        self._threads, self._scratch = threads, scratch

    def start(self, system: System, *, threads: int = 0) -> WorkerProcess:
        """Start the process of a system, with `threads` cores if it is not 0."""
        threads = threads or self._threads
        folder = self._scratch / system.name
        folder.mkdir(parents=True)
        argument = {
            "system": asdict(system),
            "checkpoint": str(self._checkpoint),
            "scratch": str(folder),
            "threads": threads,
        }
        return WorkerProcess(self._module, argument, folder / "log", threads=threads)
