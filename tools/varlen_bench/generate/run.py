"""Systems that generate, whose tokens are checked before they are timed, and the decode step."""

from __future__ import annotations

from collections.abc import Sequence

from varlen_bench.compare.generating import Comparison, ask
from varlen_bench.compare.passes import Requests
from varlen_bench.compare.results import Result, best_peer, result_of
from varlen_bench.generate.report import Step
from varlen_bench.generate.systems import OURS
from varlen_bench.generate.workload import checked
from varlen_bench.harness.worker import WorkerError, WorkerProcess, ask_once


class GenerateComparison(Comparison):
    """Systems that generate; tokens of short answers are compared with the reference."""

    module, unit, calibration_format = "varlen_bench.generate.engines", "tokens", ".0f"

    def checked(self) -> Requests:
        """Return the short part of the requests whose tokens are compared."""
        return checked(self.requests)

    def prepare(self, process: WorkerProcess, result: Result) -> None:
        """Compare the tokens of a system with the reference; this also warms it up."""
        answers = ask(process, "measure", self.checked())["answers"]
        result.equal_tokens = equal_share(answers, self.expected)

    def base(self, results: Sequence[Result]) -> Result | None:
        """Return the result of the best peer, or of varlen."""
        return best_peer(results) or result_of(results, OURS)

    def decode_step(self) -> Step:
        """Return the seconds of a decode step, and of the fastest possible one."""
        self.report(f"{self.model}: decode step")
        threads = self.settings.threads
        argument = {"checkpoint": str(self.checkpoint.resolve()), "threads": threads}
        module, log = "varlen_bench.generate.limit", self.scratch / "limit.log"
        try:
            found = ask_once(module, argument, log, threads=threads)
        except WorkerError as error:
            return Step(self.model, note=f"did not run: {error}")
        return Step(self.model, found["step"], found["limit"])


def equal_share(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that are as expected."""
    pairs = [
        ours == theirs
        for row, wanted in zip(tokens, expected, strict=True)
        for ours, theirs in zip(row, wanted, strict=True)
    ]
    return sum(pairs) / len(pairs)
