"""A subject whose systems generate: all requests at once, then as Poisson arrivals."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar

import typer

from varlen_bench.compare.passes import Requests, Unit
from varlen_bench.compare.results import Result
from varlen_bench.compare.subject import Rounds, SystemsSubject
from varlen_bench.compare.systems import REFERENCE
from varlen_bench.compare.turns import measure_in_turns, running, start_system
from varlen_bench.harness.command import Progress, refused, select
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.worker import Message, WorkerProcess


@dataclass(kw_only=True)
class GeneratingSubject(SystemsSubject[Result]):
    """A subject that compares systems on one model after the other."""

    worker: ClassVar[str]
    """Module of the worker processes."""
    unit: ClassVar[Unit]
    calibration_format: ClassVar[str]
    reference_threads: ClassVar[int] = 0
    """Threads of the process with the right answers; 0: as the others."""
    prefixes: ClassVar[Mapping[str, str]]
    """Prefix of the figures of each model."""
    by: ClassVar = ("model", "arrivals")

    repository: Annotated[Path, typer.Option(help="Model repository of the tiny model.")] = Path(
        "model_repository"
    )
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 32
    rounds: Rounds = 3
    load: float
    """Requests/s of the Poisson arrivals, as a share of what the base serves at once."""
    names: list[str] = field(init=False)

    def _choose(self, models: str) -> None:
        """Choose systems and models."""
        super().prepare()
        self.names = select(models, self.prefixes)

    @abstractmethod
    def _load_model(self, name: str, scratch: Path) -> tuple[Path, Requests]:
        """Return checkpoint and requests of a model."""

    def _checked(self, requests: Requests) -> Requests:
        """Return the requests whose answers are compared with the answers of the reference."""
        return requests

    @abstractmethod
    def _prepare_system(
        self, process: WorkerProcess, result: Result, requests: Requests, expected: Answers
    ) -> None:
        """Check a system, or warm it up, before its batch size is chosen."""

    def _figures_of(self, answer: Message, expected: Answers) -> dict[str, float]:  # noqa: ARG002  # for overriding
        """Return the figures of a measured pass."""
        figures: dict[str, float] = answer["figures"]
        return figures

    @abstractmethod
    def _base(self, results: Sequence[Result]) -> Result | None:
        """Return the result whose speed decides the arrival rate; None if no system ran."""

    def _further(self, comparison: Comparison, poisson: Sequence[Result]) -> Iterable[Result]:  # noqa: ARG002  # for overriding
        """Measure more, after all systems at the same rate."""
        return []

    def _after(self, comparison: Comparison) -> Iterable[Result]:  # noqa: ARG002  # for overriding
        """Measure more on a model, once the systems have ended."""
        return []

    def measure(self, progress: Progress) -> Iterator[Sequence[Result]]:
        """Yield the results of each model."""
        for model in self.names:
            with TemporaryDirectory(prefix="varlen-bench-") as folder:
                scratch = Path(folder)
                with refused():
                    checkpoint, requests = self._load_model(model, scratch)
                comparison = Comparison(self, model, checkpoint, requests, scratch, progress)
                yield [*comparison.compare(), *self._after(comparison)]

    def figures(self, results: Sequence[Result]) -> dict[str, Cell]:
        """Return the keys of the BENCH line of each model, behind its prefix."""
        return {
            f"{self.prefixes[model]}{key}": value
            for model in self.names
            for key, value in self._model_figures([r for r in results if r.model == model]).items()
        }

    @abstractmethod
    def _model_figures(self, results: Sequence[Result]) -> dict[str, Cell]:
        """Return the keys of one model."""


Answers = list[list[int]]


@dataclass(eq=False, slots=True)
class Comparison:
    """Systems on one model, each in its process."""

    subject: GeneratingSubject
    model: str
    checkpoint: Path
    requests: Requests
    # for logs and converted checkpoints
    scratch: Path
    report: Progress
    _expected: Answers = field(default_factory=list)
    _running: dict[str, WorkerProcess] = field(default_factory=dict)

    def compare(self) -> list[Result]:
        """Return the results of all systems, first all requests at once, then as Poisson arrivals.

        A system that fails leaves results with the reason; the others go on.
        """
        subject = self.subject
        start = partial(
            start_system, subject.worker, checkpoint=self.checkpoint, scratch=self.scratch
        )
        self.report(f"{self.model}: reference answers")
        with start(REFERENCE, threads=subject.reference_threads or subject.cores) as alone:
            self._expected = ask(alone, "measure", subject._checked(self.requests))["answers"]
        at_once = [
            Result(
                system=system,
                workload=self.requests.label,
                requests=len(self.requests),
                work=self.requests.work(subject.unit),
                speed=subject.speed,
                model=self.model,
                arrivals="at once",
            )
            for system in subject.chosen
        ]
        each_start = partial(start, threads=subject.cores)
        with running(at_once, each_start, self._prepare, self.report) as self._running:
            self._measure(at_once, self.requests)
            base = subject._base(at_once)
            if base is None:
                return at_once
            rate = subject.load * statistics.median(base.speeds) * base.requests / base.work
            poisson = self.measure_arriving(at_once, rate)
            return [*at_once, *poisson, *subject._further(self, poisson)]

    def measure_arriving(self, results: Sequence[Result], rate: float) -> list[Result]:
        """Measure the same systems with Poisson arrivals of `rate` requests/s."""
        poisson = [
            replace(result, arrivals="poisson", rate=rate, calibration="", rounds=[])
            for result in results
        ]
        self._measure(poisson, self.requests.arriving(rate, self.subject.seed))
        return poisson

    def _prepare(self, process: WorkerProcess, results: list[Result]) -> None:
        (result,) = results
        self.subject._prepare_system(process, result, self.requests, self._expected)
        answer = ask(process, "calibrate", self.requests)
        result.batch = answer["size"]
        speeds = answer["calibration"].items()
        result.calibration = "; ".join(
            f"{size}: {speed:{self.subject.calibration_format}}" for size, speed in speeds
        )

    def _measure(self, results: Sequence[Result], requests: Requests) -> None:
        def measure(result: Result) -> dict[str, float]:
            answer = ask(self._running[result.system.name], "measure", requests)
            return self.subject._figures_of(answer, self._expected)

        measure_in_turns(results, measure, rounds=self.subject.rounds, report=self.report)


def ask(process: WorkerProcess, order: str, requests: Requests) -> Message:
    """Send an order about requests to the process of a system; return its answer."""
    return process.ask(do=order, requests=asdict(requests))
