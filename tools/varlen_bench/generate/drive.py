"""One pass over a workload: requests at their due times, moments of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

from varlen_bench.generate.engines import OnToken, RunBatch, Submit
from varlen_bench.generate.workload import Workload
from varlen_bench.harness.arrivals import run_batches, submit_when_due
from varlen_bench.harness.generating import System
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import percentile

_ANSWER_SECONDS = 1800.0


@dataclass(slots=True)
class Answer:
    """The tokens of one request, and when each came, in seconds from the beginning."""

    due: float
    tokens: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)


def drive_iterations(submit: Submit, workload: Workload) -> list[Answer]:
    """Return the answers to a workload whose requests start when they are due."""
    answers = [Answer(due) for due in workload.due]
    running: list[Future[None]] = []

    def start(request: int, began: float) -> None:
        on_token = _recorder([answers[request]], began)
        running.append(submit(workload.prompts[request], workload.outputs[request], on_token))

    submit_when_due(workload.due, start)
    for each in running:
        each.result(timeout=_ANSWER_SECONDS)
    return _checked(answers, workload)


def drive_batches(run: RunBatch, workload: Workload, system: System, size: int) -> list[Answer]:
    """Return the answers to a workload in batches that run to their end.

    A batch starts as soon as the last one has ended, with the requests that wait.
    """
    answers = [Answer(due) for due in workload.due]

    def run_batch(batch: Sequence[int], began: float) -> None:
        run(
            [workload.prompts[request] for request in batch],
            [workload.outputs[request] for request in batch],
            _recorder([answers[request] for request in batch], began),
        )

    def choose(waiting: Sequence[int]) -> list[int]:
        return system.next_batch(waiting, workload.prompts, size)

    run_batches(workload.due, choose, run_batch)
    return _checked(answers, workload)


def figures(answers: Sequence[Answer]) -> dict[str, Cell]:
    """Return the figures of a pass; times in milliseconds.

    `per_token`: from arrival to the last token, by the number of tokens, as in Orca. `gap`: between two tokens.
    """
    tokens = sum(len(answer.tokens) for answer in answers)
    end = max(answer.moments[-1] for answer in answers)
    first = [answer.moments[0] - answer.due for answer in answers]
    whole = [(answer.moments[-1] - answer.due) / len(answer.tokens) for answer in answers]
    gaps = [after - before for answer in answers for before, after in pairwise(answer.moments)]
    found: dict[str, Cell] = {"tokens_per_second": tokens / (end - answers[0].due)}
    for name, seconds in (("ttft", first), ("per_token", whole), ("gap", gaps)):
        for percent in (50, 99):
            value = percentile(seconds, percent)
            found[f"{name}_p{percent}_ms"] = None if value is None else 1000 * value
    return found


def _recorder(answers: Sequence[Answer], began: float) -> OnToken:
    def record(row: int, token: int, moment: float) -> None:
        answers[row].tokens.append(token)
        answers[row].moments.append(moment - began)

    return record


def _checked(answers: list[Answer], workload: Workload) -> list[Answer]:
    counts = [len(answer.tokens) for answer in answers]
    if counts != workload.outputs:
        raise RuntimeError(f"generated {sum(counts)} tokens; expected {workload.num_tokens}")
    return answers
