"""Systems that translate, higher rates of arrivals for varlen, and the isolated step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from varlen_bench.beam.step import StepTimes
from varlen_bench.beam.systems import OURS, TRANSFORMERS
from varlen_bench.compare.generating import Comparison, ask
from varlen_bench.compare.results import Result, result_of
from varlen_bench.harness.worker import Message, WorkerError, WorkerProcess, ask_once

# Rates of arrivals at which varlen is measured, as multiples of the rate of all systems.
_MULTIPLES = (2.0, 3.0, 4.0, 6.0)


class BeamComparison(Comparison):
    """Systems that translate; the answers of every round are compared with the reference."""

    module, unit, calibration_format = "varlen_bench.beam.engines", "sentences", ".3g"
    # with two, a single sentence waits long for other work of the machine
    reference_threads = 1

    def prepare(self, process: WorkerProcess, result: Result) -> None:  # noqa: ARG002
        """Warm a system up."""
        ask(process, "warm up", self.requests)

    def figures(self, answer: Message) -> dict[str, float]:
        """Return the figures of a pass, and the answers that equal the reference."""
        pairs = zip(answer["answers"], self.expected, strict=True)
        equal = sum(answer == wanted for answer, wanted in pairs)
        return {**answer["figures"], "equal_hypotheses": equal}

    def base(self, results: Sequence[Result]) -> Result | None:
        """Return the result of transformers, or of another system that ran."""
        ran = (result for result in results if result.rounds)
        return result_of(results, TRANSFORMERS) or next(ran, None)

    def further(self, poisson: Sequence[Result]) -> list[Result]:
        """Measure varlen at higher rates, until its latency exceeds the latency of transformers."""
        ours, theirs = result_of(poisson, OURS), result_of(poisson, TRANSFORMERS)
        if ours is None or theirs is None or ours.rate is None:
            return []
        limit, found = theirs.median("latency_p99_ms"), list[Result]()
        for multiple in _MULTIPLES:
            found += self.measure_arriving([ours], multiple * ours.rate)
            latency = found[-1].median("latency_p99_ms")
            if latency is None or limit is None or latency > limit:
                break
        return found


def measure_steps(*, threads: int, scratch: Path) -> list[StepTimes]:
    """Return the times of the isolated step, for all shapes.

    Raises:
        RuntimeError: the step did not run; the message says why.
    """
    module, log = "varlen_bench.beam.step", scratch / "step.log"
    try:
        answer = ask_once(module, {"threads": threads}, log, threads=threads)
    except WorkerError as error:
        raise RuntimeError(f"the step did not run: {error}") from error
    return [StepTimes(**times) for times in answer["steps"]]
