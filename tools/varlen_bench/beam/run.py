"""The order of a run: reference answers, preparation, rounds, higher rates, the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from varlen_bench.beam.report import Result
from varlen_bench.beam.step import StepTimes
from varlen_bench.beam.systems import OURS, REFERENCE, TRANSFORMERS
from varlen_bench.beam.workload import Workload
from varlen_bench.harness.command import Progress
from varlen_bench.harness.generating import Arrivals, System, SystemProcesses
from varlen_bench.harness.turns import measure_in_turns, noted_failure
from varlen_bench.harness.worker import Message, WorkerError, WorkerProcess

# Rates of arrivals at which varlen is measured, as multiples of the rate of all systems.
_MULTIPLES = (2.0, 3.0, 4.0, 6.0)


class Comparison:
    """Systems on one model, each in its process.

    Args:
        model: its name.
        load: requests/s of the Poisson arrivals, as a share of what transformers serves at once.
        scratch: folder for logs and converted checkpoints.
    """

    def __init__(
        self,
        model: str,
        checkpoint: Path,
        workload: Workload,
        *,
        threads: int,
        load: float,
        seed: int,
        scratch: Path,
        report: Progress,
    ) -> None:
        self._model, self._workload = model, workload
        self._load, self._seed, self._report = load, seed, report
        self._processes = SystemProcesses(
            "varlen_bench.beam.worker", checkpoint, threads=threads, scratch=scratch
        )
        self._running: dict[str, WorkerProcess] = {}

    def compare(self, systems: Sequence[System], rounds: int) -> list[Result]:
        """Return the results of all systems, first all at once, then as Poisson arrivals.

        varlen is measured at higher rates too, while its latency stays below that of transformers. A system that fails
        leaves results with the reason; the others go on.
        """
        self._report(f"{self._model}: reference answers")
        # one thread: with two, a sentence alone waits long for other work of the machine
        with self._processes.start(REFERENCE, threads=1) as alone:
            expected = _ask(alone, "measure", self._workload)["answers"]
        with ExitStack() as processes:
            at_once = [self._result(system, "at once") for system in systems]
            for result in at_once:
                self._report(f"{self._model}: prepare {result.system.name}")
                with noted_failure(result, self._report):
                    process = processes.enter_context(self._processes.start(result.system))
                    answer = _ask(process, "calibrate", self._workload)
                    result.size = answer["size"]
                    speeds = answer["calibration"].items()
                    result.calibration = "; ".join(f"{size}: {each:.3g}" for size, each in speeds)
                    self._running[result.system.name] = process
            self._measure(at_once, self._workload, expected, rounds)
            rate = self._rate(at_once)
            if rate is None:
                return at_once
            poisson = [self._poisson(result, rate) for result in at_once]
            arriving = self._workload.arriving(rate, self._seed)
            self._measure(poisson, arriving, expected, rounds)
            return [*at_once, *poisson, *self._faster(poisson, expected, rounds)]

    def _faster(
        self, poisson: Sequence[Result], expected: list[list[int]], rounds: int
    ) -> list[Result]:
        """Return the results of varlen at higher rates, until one is too high."""
        by_name = {result.system.name: result for result in poisson if result.rounds}
        ours, theirs = by_name.get(OURS), by_name.get(TRANSFORMERS)
        if ours is None or theirs is None or ours.rate is None:
            return []
        limit, found = theirs.median("latency_p99_ms"), []
        for multiple in _MULTIPLES:
            result = self._poisson(ours, multiple * ours.rate)
            arriving = self._workload.arriving(multiple * ours.rate, self._seed)
            self._measure([result], arriving, expected, rounds)
            found.append(result)
            latency = result.median("latency_p99_ms")
            if latency is None or limit is None or latency > limit:
                break
        return found

    def _result(self, system: System, arrivals: Arrivals) -> Result:
        load = self._workload
        return Result(system, self._model, load.label, arrivals, len(load.sources))

    def _poisson(self, other: Result, rate: float) -> Result:
        result = self._result(other.system, "poisson")
        result.rate, result.size, result.note = rate, other.size, other.note
        return result

    def _measure(
        self,
        results: Sequence[Result],
        workload: Workload,
        expected: list[list[int]],
        rounds: int,
    ) -> None:
        def measure(result: Result) -> dict[str, float]:
            found = _ask(self._running[result.system.name], "measure", workload)
            pairs = zip(found["answers"], expected, strict=True)
            equal = sum(answer == wanted for answer, wanted in pairs)
            result.equal = equal if result.equal is None else min(result.equal, equal)
            figures: dict[str, float] = found["figures"]
            return figures

        title = f"{self._model}, {results[0].arrivals}"
        measure_in_turns(results, measure, rounds=rounds, title=title, report=self._report)

    def _rate(self, results: Sequence[Result]) -> float | None:
        """Return the requests/s of the Poisson arrivals; None if no system ran."""
        speeds = {result.system.name: result.median("sentences_per_second") for result in results}
        base = speeds.get(TRANSFORMERS) or next(filter(None, speeds.values()), None)
        return None if base is None else self._load * base


def measure_steps(*, threads: int, scratch: Path) -> list[StepTimes]:
    """Return the times of the step alone, of all shapes.

    Raises:
        RuntimeError: the step did not run; the message says why.
    """
    module, log = "varlen_bench.beam.step", scratch / "step.log"
    try:
        with WorkerProcess(module, {"threads": threads}, log, threads=threads) as process:
            return [StepTimes(**times) for times in process.ask()["steps"]]
    except WorkerError as error:
        raise RuntimeError(f"the step did not run: {error}") from error


def _ask(process: WorkerProcess, order: str, workload: Workload) -> Message:
    return process.ask(do=order, workload=asdict(workload))
