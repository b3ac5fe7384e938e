"""One pass over requests that generate, each at its due time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias

from varlen_bench.compare.systems import System
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import percentile_ms
from varlen_bench.workloads import next_poisson_times

Ids: TypeAlias = Sequence[int]
# Gets the number of a prompt, its next tokens, and their moment by time.perf_counter.
OnTokens: TypeAlias = Callable[[int, Ids, float], None]
# Runs a batch to its end: prompts, and the most tokens of each answer.
RunBatch: TypeAlias = Callable[[Sequence[Ids], Sequence[int], OnTokens], None]
# Starts one request; the future is done after its last token. An engine that takes lists has `submit_all`, too, which
# starts prompts of one limit.
Submit: TypeAlias = Callable[[Ids, int, OnTokens], "Future[Any]"]

# What a speed counts.
Unit: TypeAlias = Literal["sentences", "tokens"]

_ANSWER_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in order of arrival.

    Attributes:
        label: description for tables and rows.
        prompts: token ids of each request.
        limits: most tokens of each answer; an answer that never ends has as many.
        due: arrival time of each request, in seconds from the beginning, ascending.
    """

    label: str
    prompts: list[list[int]]
    limits: list[int]
    due: list[float]

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def at_once(cls, label: str, prompts: list[list[int]], limits: list[int]) -> Requests:
        """Return requests that arrive at the beginning."""
        return cls(label, prompts, limits, [0.0] * len(prompts))

    def work(self, unit: Unit) -> int:
        """Return the sentences, or the most tokens of their answers."""
        return sum(self.limits) if unit == "tokens" else len(self)

    def arriving(self, rate: float, seed: int) -> Requests:
        """Return the same requests as a Poisson process of `rate` requests/s."""
        return replace(self, due=next_poisson_times(len(self), rate, seed))

    def part(self, chosen: Sequence[int]) -> Requests:
        """Return some of the requests, all at once."""
        prompts = [self.prompts[request] for request in chosen]
        return Requests.at_once(self.label, prompts, [self.limits[request] for request in chosen])


@dataclass(slots=True)
class Answer:
    """The tokens of one request; times in seconds from the beginning."""

    due: float
    tokens: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    end: float = 0.0


def drive_iterations(submit: Submit, requests: Requests) -> list[Answer]:
    """Return the answers to requests that start when they are due.

    Those that are due together and have one limit start together, if the engine takes lists.
    """
    answers = [Answer(due) for due in requests.due]
    running = []
    submit_all = getattr(submit, "submit_all", None)
    began = time.perf_counter()
    order = zip(requests.due, requests.limits, requests.prompts, answers, strict=True)
    for (due, limit), group in groupby(order, key=lambda request: request[:2]):
        _, _, prompts, own = zip(*group, strict=True)
        _sleep_until(began + due)
        if submit_all is not None:
            running.append(submit_all(prompts, limit, _recorder(own, began)))
            continue
        for prompt, answer in zip(prompts, own, strict=True):
            running.append(submit(prompt, limit, _recorder([answer], began)))
    for each in running:
        each.result(timeout=_ANSWER_SECONDS)
    return answers


def drive_batches(
    run: RunBatch, requests: Requests, system: System, size: int, *, instances: int = 1
) -> list[Answer]:
    """Return the answers to requests in batches that run to their end.

    A batch starts as soon as an instance has ended its last one, with the requests that wait.
    """
    answers = [Answer(due) for due in requests.due]
    left = list(range(len(answers)))
    is_taking = threading.Lock()
    began = time.perf_counter()

    def next_batch() -> list[int]:
        # a request that is not due holds up the others that take: they would wait for it too
        with is_taking:
            if not left:
                return []
            _sleep_until(began + requests.due[left[0]])
            now = time.perf_counter() - began
            waiting = [request for request in left if requests.due[request] <= now]
            batch = system.ordered(waiting, requests.prompts)[:size]
            left[:] = [request for request in left if request not in set(batch)]
            return batch

    def run_instance() -> None:
        while batch := next_batch():
            part = requests.part(batch)
            recorder = _recorder([answers[request] for request in batch], began)
            run(part.prompts, part.limits, recorder)

    if instances == 1:
        run_instance()
        return answers
    with ThreadPoolExecutor(instances) as threads:
        for done in [threads.submit(run_instance) for _ in range(instances)]:
            done.result()
    return answers


def run_together(
    submit: Submit, prompts: Sequence[Ids], counts: Sequence[int], on_tokens: OnTokens
) -> None:
    """Submit a batch and wait for its last request: batches at the level of requests."""

    def tokens_of(row: int) -> OnTokens:
        return lambda _, tokens, moment: on_tokens(row, tokens, moment)

    pairs = zip(prompts, counts, strict=True)
    running = [submit(ids, count, tokens_of(row)) for row, (ids, count) in enumerate(pairs)]
    for each in running:
        each.result()


def percentiles_ms(name: str, seconds: Sequence[float]) -> dict[str, Cell]:
    """Return the figures `name`_p50_ms and `name`_p99_ms; None of no samples."""
    return {f"{name}_p{percent}_ms": percentile_ms(seconds, percent) for percent in (50, 99)}


def _recorder(answers: Sequence[Answer], began: float) -> OnTokens:
    def record(row: int, tokens: Ids, moment: float) -> None:
        answer, moment = answers[row], moment - began
        answer.tokens += tokens
        answer.moments += [moment] * len(tokens)
        answer.end = moment

    return record


def _sleep_until(moment: float) -> None:
    # even a sleep of no time lets other threads run, between two requests that are due
    if (left := moment - time.perf_counter()) > 0.0:
        time.sleep(left)
