"""One pass over a workload: answers, and how long each took from its arrival."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from varlen_bench.beam.engines import RunBatch, Submit
from varlen_bench.beam.workload import Workload
from varlen_bench.harness.arrivals import run_batches, submit_when_due
from varlen_bench.harness.generating import System
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import percentile

_ANSWER_SECONDS = 1800.0


@dataclass(slots=True)
class Answer:
    """The tokens of one request, and when they came, in seconds from the beginning."""

    due: float
    tokens: list[int] = field(default_factory=list)
    moment: float = 0.0


def drive_iterations(submit: Submit, workload: Workload) -> list[Answer]:
    """Return the answers to a workload whose requests start when they are due."""
    answers = [Answer(due) for due in workload.due]
    running: list[Future[list[int]]] = []

    def start(request: int, began: float) -> None:
        def finish(_: Future[list[int]]) -> None:
            answers[request].moment = time.perf_counter() - began

        future = submit(workload.sources[request], workload.limits[request])
        future.add_done_callback(finish)
        running.append(future)

    submit_when_due(workload.due, start)
    for answer, future in zip(answers, running, strict=True):
        answer.tokens = future.result(timeout=_ANSWER_SECONDS)
    return answers


def drive_batches(run: RunBatch, workload: Workload, system: System, size: int) -> list[Answer]:
    """Return the answers to a workload in batches that run to their end."""
    answers = [Answer(due) for due in workload.due]

    def run_batch(batch: Sequence[int], began: float) -> None:
        part = workload.part(list(batch))
        found = run(part.sources, part.limits)
        moment = time.perf_counter() - began
        for request, tokens in zip(batch, found, strict=True):
            answers[request].tokens, answers[request].moment = tokens, moment

    def choose(waiting: Sequence[int]) -> list[int]:
        return system.next_batch(waiting, workload.sources, size)

    run_batches(workload.due, choose, run_batch)
    return answers


def figures(answers: Sequence[Answer]) -> dict[str, Cell]:
    """Return the figures of a pass; latency in milliseconds from arrival to answer."""
    end = max(answer.moment for answer in answers)
    found: dict[str, Cell] = {
        "sentences_per_second": len(answers) / (end - answers[0].due),
        "tokens": sum(len(answer.tokens) for answer in answers),
    }
    for percent in (50, 99):
        seconds = percentile([answer.moment - answer.due for answer in answers], percent)
        found[f"latency_p{percent}_ms"] = None if seconds is None else 1000 * seconds
    return found
