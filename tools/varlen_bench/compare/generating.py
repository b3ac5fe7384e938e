"""A comparison of systems that generate: all requests at once, then as Poisson arrivals."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, TypeVar

from varlen_bench.compare.passes import Requests, Unit
from varlen_bench.compare.results import Result
from varlen_bench.compare.systems import REFERENCE, System
from varlen_bench.compare.turns import measure_in_turns, running, start_system
from varlen_bench.harness.command import Progress, Run, refused
from varlen_bench.harness.worker import Message, WorkerProcess

AnyComparison = TypeVar("AnyComparison", bound="Comparison")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run measures.

    Attributes:
        threads: threads of each system.
        rounds: measured passes of each system.
        load: requests/s of the Poisson arrivals, as a share of what the base serves at once.
        seed: seed of the arrivals.
    """

    threads: int
    rounds: int
    load: float
    seed: int


@dataclass(eq=False)
class Comparison(ABC):
    """Systems on one model, each in its process.

    Attributes:
        scratch: folder for logs and converted checkpoints.
        report: prints the progress.
        expected: answers of the reference to the checked requests.
    """

    module: ClassVar[str]
    """Module of the worker processes."""
    unit: ClassVar[Unit]
    calibration_format: ClassVar[str]
    reference_threads: ClassVar[int] = 0
    """Threads of the process with the right answers; 0: as the others."""

    model: str
    checkpoint: Path
    requests: Requests
    settings: RunSettings
    scratch: Path
    report: Progress
    expected: list[list[int]] = field(init=False)
    _running: dict[str, WorkerProcess] = field(init=False)

    def compare(self, systems: Iterable[System]) -> list[Result]:
        """Return the results of all systems, first all requests at once, then as Poisson arrivals.

        A system that fails leaves results with the reason; the others go on.
        """
        self.report(f"{self.model}: reference answers")
        with self._start(REFERENCE, threads=self.reference_threads) as alone:
            self.expected = ask(alone, "measure", self.checked())["answers"]
        at_once = [self._result(system) for system in systems]
        with running(at_once, self._start, self._prepare, self.report) as self._running:
            self._measure(at_once, self.requests)
            base = self.base(at_once)
            if base is None:
                return at_once
            rate = self.settings.load * statistics.median(base.speeds) * base.requests / base.work
            poisson = self.measure_arriving(at_once, rate)
            return [*at_once, *poisson, *self.further(poisson)]

    def checked(self) -> Requests:
        """Return the requests whose answers are compared with the answers of the reference."""
        return self.requests

    @abstractmethod
    def prepare(self, process: WorkerProcess, result: Result) -> None:
        """Check a system, or warm it up, before its batch size is chosen."""

    def figures(self, answer: Message) -> dict[str, float]:
        """Return the figures of a measured pass."""
        figures: dict[str, float] = answer["figures"]
        return figures

    @abstractmethod
    def base(self, results: Sequence[Result]) -> Result | None:
        """Return the result whose speed decides the arrival rate; None if no system ran."""

    def further(self, poisson: Sequence[Result]) -> list[Result]:  # noqa: ARG002  # for overriding
        """Measure more, after all systems at the same rate."""
        return []

    def measure_arriving(self, results: Sequence[Result], rate: float) -> list[Result]:
        """Measure the same systems with Poisson arrivals of `rate` requests/s."""
        poisson = [
            replace(result, arrivals="poisson", rate=rate, calibration="", rounds=[])
            for result in results
        ]
        self._measure(poisson, self.requests.arriving(rate, self.settings.seed))
        return poisson

    def _start(self, system: System, threads: int = 0) -> WorkerProcess:
        threads = threads or self.settings.threads
        return start_system(self.module, system, self.checkpoint, self.scratch, threads=threads)

    def _prepare(self, process: WorkerProcess, results: list[Result]) -> None:
        (result,) = results
        self.prepare(process, result)
        answer = ask(process, "calibrate", self.requests)
        result.batch = answer["size"]
        speeds = answer["calibration"].items()
        result.calibration = "; ".join(
            f"{size}: {speed:{self.calibration_format}}" for size, speed in speeds
        )

    def _result(self, system: System) -> Result:
        return Result(
            system=system,
            workload=self.requests.label,
            requests=len(self.requests),
            work=self.requests.work(self.unit),
            speed=f"{self.unit}_per_second",
            model=self.model,
            arrivals="at once",
        )

    def _measure(self, results: Sequence[Result], requests: Requests) -> None:
        def measure(result: Result) -> dict[str, float]:
            return self.figures(ask(self._running[result.system.name], "measure", requests))

        measure_in_turns(results, measure, rounds=self.settings.rounds, report=self.report)


def compare_models(
    kind: type[AnyComparison],
    models: Iterable[str],
    prepare: Callable[[str, Path], tuple[Path, Requests]],
    systems: Sequence[System],
    settings: RunSettings,
    bench: Run,
) -> Iterator[tuple[AnyComparison, list[Result]]]:
    """Yield the comparison of each model and its results.

    Args:
        prepare: returns checkpoint and requests of a model; gets its name and a scratch folder.
    """
    for model in models:
        with TemporaryDirectory(prefix="varlen-bench-") as folder, bench.progress() as progress:
            scratch = Path(folder)
            with refused():
                checkpoint, requests = prepare(model, scratch)
            comparison = kind(model, checkpoint, requests, settings, scratch, progress)
            yield comparison, comparison.compare(systems)


def ask(process: WorkerProcess, order: str, requests: Requests) -> Message:
    """Send an order about requests to the process of a system; return its answer."""
    return process.ask(do=order, requests=asdict(requests))
