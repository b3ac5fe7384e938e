"""The order of a run: reference tokens, preparation, rounds in turn, the decode step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from varlen_bench.generate.report import Result, Step, best_peer
from varlen_bench.generate.systems import OURS, REFERENCE
from varlen_bench.generate.workload import Workload
from varlen_bench.harness.command import Progress
from varlen_bench.harness.generating import Arrivals, System, SystemProcesses
from varlen_bench.harness.turns import measure_in_turns, noted_failure
from varlen_bench.harness.worker import Message, WorkerError, WorkerProcess


class Comparison:
    """Systems on one model, each in its process.

    Args:
        model: its name.
        load: requests/s of the Poisson arrivals, as a share of what the best peer serves.
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
        self._model, self._checkpoint, self._workload = model, checkpoint, workload
        self._threads, self._load, self._seed = threads, load, seed
        self._scratch, self._report = scratch, report
        self._processes = SystemProcesses(
            "varlen_bench.generate.worker", checkpoint, threads=threads, scratch=scratch
        )

    def compare(self, systems: Sequence[System], rounds: int) -> list[Result]:
        """Return the results of all systems, first all at once, then as Poisson arrivals.

        A system that fails leaves results with the reason; the others go on.
        """
        self._report(f"{self._model}: reference tokens")
        with self._processes.start(REFERENCE) as alone:
            expected = _ask(alone, "check", self._workload.checked())["tokens"]
        with ExitStack() as processes:
            running = {}
            at_once = [self._result(system, "at once") for system in systems]
            for result in at_once:
                self._report(f"{self._model}: prepare {result.system.name}")
                with noted_failure(result, self._report):
                    process = processes.enter_context(self._processes.start(result.system))
                    _prepare(process, result, self._workload, expected)
                    running[result.system.name] = process
            self._measure(at_once, running, self._workload, rounds)
            rate = self._rate(at_once)
            if rate is None:
                return at_once
            arriving = self._workload.arriving(rate, self._seed)
            poisson = [self._poisson(result, rate) for result in at_once]
            self._measure(poisson, running, arriving, rounds)
        return [*at_once, *poisson]

    def decode_step(self) -> Step:
        """Return the seconds of a decode step, and of the fastest possible one."""
        self._report(f"{self._model}: decode step")
        argument = {"checkpoint": str(self._checkpoint.resolve()), "threads": self._threads}
        log = self._scratch / "limit.log"
        try:
            module = "varlen_bench.generate.limit"
            with WorkerProcess(module, argument, log, threads=self._threads) as process:
                found = process.ask()
        except WorkerError as error:
            return Step(self._model, note=f"did not run: {error}")
        return Step(self._model, found["step"], found["limit"])

    def _result(self, system: System, arrivals: Arrivals) -> Result:
        load = self._workload
        requests, tokens = len(load.prompts), load.num_tokens
        return Result(system, self._model, load.label, arrivals, requests, tokens=tokens)

    def _poisson(self, at_once: Result, rate: float) -> Result:
        result = self._result(at_once.system, "poisson")
        result.rate, result.size, result.note = rate, at_once.size, at_once.note
        result.equal_tokens = at_once.equal_tokens
        return result

    def _measure(
        self,
        results: Sequence[Result],
        running: dict[str, WorkerProcess],
        workload: Workload,
        rounds: int,
    ) -> None:
        def measure(result: Result) -> dict[str, float]:
            return _ask(running[result.system.name], "measure", workload)

        title = f"{self._model}, {results[0].arrivals}"
        measure_in_turns(results, measure, rounds=rounds, title=title, report=self._report)

    def _rate(self, results: Sequence[Result]) -> float | None:
        """Return the requests/s of the Poisson arrivals; None if no system ran."""
        ours = (result for result in results if result.system.name == OURS and result.rounds)
        base = best_peer(results) or next(ours, None)
        speed = base.median("tokens_per_second") if base else None
        if base is None or speed is None:
            return None
        return self._load * speed * base.requests / base.tokens


def equal_share(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that are as expected."""
    pairs = [
        ours == theirs
        for row, wanted in zip(tokens, expected, strict=True)
        for ours, theirs in zip(row, wanted, strict=True)
    ]
    return sum(pairs) / len(pairs)


def _prepare(
    process: WorkerProcess, result: Result, workload: Workload, expected: list[list[int]]
) -> None:
    tokens = _ask(process, "check", workload.checked())["tokens"]
    result.equal_tokens = equal_share(tokens, expected)
    answer = _ask(process, "calibrate", workload)
    result.size = answer["size"]
    speeds = answer["calibration"].items()
    result.calibration = "; ".join(f"{size}: {speed:.0f}" for size, speed in speeds)


def _ask(process: WorkerProcess, order: str, workload: Workload) -> Message:
    return process.ask(do=order, workload=asdict(workload))
