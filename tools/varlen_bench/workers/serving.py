"""The process that sends requests over gRPC and answers with the row of each load.

Its interpreter does nothing else, and its garbage collector waits until a load is done.
"""

from __future__ import annotations

import asyncio
import gc
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, aio
from tritonclient.utils import InferenceServerException

from varlen_bench.harness.generator import (
    LATE_SECONDS,
    LoadRecord,
    Outcome,
    RequestRecord,
    offer,
    saturate,
)
from varlen_bench.harness.summary import percentile_ms, ratio
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.workloads import Mix, poisson_times, token_ids

# The tensors of every model.
INPUT, OUTPUT = "input_ids", "sentence_embedding"
# A request that names no outputs gets all that a model has, and peers have one.
_WANTED = [InferRequestedOutput(OUTPUT)]
# gRPC's words for a lost connection; a full queue has the same status.
_CONNECTION = re.compile(r"connect|socket|goaway|stream removed|recvmsg", re.IGNORECASE)
Kind: TypeAlias = Literal[
    "closed",
    "load",
    "most",
    "paired",
    "overload",
    "lone",
    "gateway",
    "perf_analyzer",
    "result",
    "failed",
]
# Seconds at the beginning of a load that are not measured.
WARMUP_SECONDS = 1.0
# Requests in flight of a closed loop, and the number of different ones.
IN_FLIGHT, _CLOSED_REQUESTS = 8, 1024
# Lengths of requests that are sent one by one, in tokens.
_LONE_TOKENS = (3, 16, 128, 512)
# Share of late requests that ends a load which may be given up.
_LATE_SHARE = 0.01
# Requests that may wait, in seconds of what a system serves: six times the latency that is allowed.
_BACKLOG_SECONDS, _MIN_WAITING = 3.0, 16
# A p99 of fewer requests is their maximum.
_ENOUGH_REQUESTS, _LONGEST = 100, 1.5
# A sustained load has at most this p99, and at least this share of good answers.
GOAL_P99_MS = 1000 * LATE_SECONDS
_GOAL_SHARE = 0.98


@dataclass(frozen=True, slots=True)
class Load:
    """Requests for one model.

    Attributes:
        seconds: measured seconds, after the warm-up.
        rate: requests/s at fixed times; None: a closed loop.
        max_waiting: limit on requests without an answer; a closed loop always has this number.
        may_give_up: whether the load ends once too many requests are late.
    """

    kind: Kind
    mix: Mix
    seconds: float
    seed: int
    rate: float | None = None
    max_waiting: int = IN_FLIGHT
    may_give_up: bool = False
    deadline_ms: int | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Load:
        """Return the load whose `asdict` went through JSON."""
        return cls(**{**fields, "mix": Mix(**fields["mix"])})

    @property
    def end(self) -> float:
        """Seconds from the beginning to the end."""
        return WARMUP_SECONDS + self.seconds

    @property
    def max_late(self) -> int | None:
        """Late requests after which the load is given up; None: never."""
        # one more than the share: the last value of a percentile is chance
        return int(_LATE_SHARE * len(self.due_times())) + 1 if self.may_give_up else None

    def due_times(self) -> list[float]:
        """Return when requests are due, in seconds from the beginning; none in a closed loop."""
        return [] if self.rate is None else poisson_times(self.rate, self.end, self.seed)

    def token_ids(self, vocabulary: int) -> list[list[int]]:
        """Return the token ids of each request."""
        count = _CLOSED_REQUESTS if self.rate is None else len(self.due_times())
        return token_ids(self.mix.take(count, self.seed), vocabulary, self.seed)


def lone_mixes(limit: int) -> list[Mix]:
    """Return the lengths of requests that are sent one by one."""
    lengths = dict.fromkeys(min(tokens, limit) for tokens in _LONE_TOKENS)
    return [Mix(f"lone_{tokens}", f"lone {tokens}", (tokens,)) for tokens in lengths]


def max_waiting(capacity: float) -> int:
    """Return how many requests may wait for a system of `capacity` requests/s."""
    return max(_MIN_WAITING, math.ceil(_BACKLOG_SECONDS * capacity))


def seconds_at(rate: float, seconds: float) -> float:
    """Return the measured seconds at `rate`: up to 50 % more, to see 100 requests."""
    return min(max(seconds, _ENOUGH_REQUESTS / rate), _LONGEST * seconds)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the CSV; docs/benchmarks/serving.md explains its columns."""

    lengths: str
    system: str
    kind: Kind
    offered: float | None = None
    seconds: float | None = None
    warmup: int | None = None
    sent: int | None = None
    ok: int | None = None
    refused: int | None = None
    failed: int | None = None
    lost: int | None = None
    not_sent: int | None = None
    served: float | None = None
    share: float | None = None
    mean_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    lateness_p99_ms: float | None = None
    refused_p99_ms: float | None = None
    kept_deadline: float | None = None
    mean_batch: float | None = None
    padding_share: float | None = None
    prediction_error: float | None = None
    rss_mib: float | None = None
    rss_flatness: float | None = None
    machine_gflops: float | None = None
    cosine_min: float | None = None
    sustained: float | None = None
    saturated: float | None = None
    turn: int | None = None
    note: str = ""

    @property
    def is_sustained(self) -> bool:
        """Whether nearly all requests are answered quickly, and every request is answered."""
        if self.lost or self.share is None or self.p99_ms is None:
            return False
        return self.share >= _GOAL_SHARE and self.p99_ms <= GOAL_P99_MS

    @property
    def capacity(self) -> float:
        """Requests/s of a closed loop, also if no answer came in the measured seconds."""
        return self.served or (self.ok or 0) / ((self.seconds or 0.0) + IN_FLIGHT)


def load_row(load: Load, system: str, record: LoadRecord, end: float | None = None) -> Row:
    """Return the row of a load; `end` ends its measured seconds."""
    if end is None:
        end = max(WARMUP_SECONDS, record.end) if record.is_given_up else load.end
    outcomes = Counter(request.outcome for request in record.requests)
    measured = [request for request in record.requests if request.due >= WARMUP_SECONDS]
    good = [request for request in measured if request.outcome == "ok"]
    refused = [request for request in measured if request.outcome == "refused"]
    due = len(measured) + sum(moment >= WARMUP_SECONDS for moment in record.not_sent)
    latencies = [request.latency() for request in good]
    note = ["given up: too many were late"] if record.is_given_up else []
    return Row(
        load.mix.label,
        system,
        load.kind,
        offered=load.rate,
        seconds=end - WARMUP_SECONDS,
        warmup=len(record.requests) - len(measured),
        sent=len(record.requests),
        ok=outcomes["ok"],
        refused=outcomes["refused"],
        failed=outcomes["failed"],
        lost=outcomes["unanswered"],
        not_sent=len(record.not_sent),
        served=_served(record.requests, end),
        share=len(good) / due if due else 0.0,
        mean_ms=1000 * statistics.fmean(latencies) if latencies else None,
        p50_ms=percentile_ms(latencies, 50),
        p99_ms=percentile_ms(latencies, 99),
        lateness_p99_ms=percentile_ms([request.sent - request.due for request in measured], 99),
        refused_p99_ms=percentile_ms([request.latency(since_sent=True) for request in refused], 99),
        kept_deadline=None if load.deadline_ms is None else _kept(good, load.deadline_ms),
        note="; ".join([*note, *record.reasons]),
    )


def _served(requests: Iterable[RequestRecord], end: float) -> float:
    """Return the good answers/s that came in the measured seconds, whenever they were asked for."""
    if end <= WARMUP_SECONDS:
        return 0.0
    done = [request.done or 0.0 for request in requests if request.outcome == "ok"]
    return sum(WARMUP_SECONDS <= moment < end for moment in done) / (end - WARMUP_SECONDS)


def _kept(good: Sequence[RequestRecord], deadline_ms: int) -> float | None:
    kept = (request.latency(since_sent=True) <= deadline_ms / 1000 for request in good)
    return ratio(sum(kept), len(good))


def outcome_of(error: InferenceServerException) -> Outcome:
    """Return whether an error is a refusal, which a caller may retry, or a failure."""
    message, status = str(error.message()), str(error.status())
    is_refusal = "UNAVAILABLE" in status and not _CONNECTION.search(message)
    return "refused" if is_refusal else "failed"


def start(argument: Message) -> Callable[[Message], Message]:
    """Return the function that answers orders for `models`: a `load`, or `requests` to embed."""
    address, vocabulary = argument["address"], argument["vocabulary"]

    def handle(order: Message) -> Message:
        if "requests" in order:
            return asyncio.run(_embed(address, order["models"], order["requests"]))
        load = Load.from_json(order["load"])
        gc.collect()
        gc.disable()
        row = asyncio.run(_offer(address, order["models"], load, load.token_ids(vocabulary)))
        gc.enable()
        return asdict(row)

    return handle


async def _offer(
    address: str, models: Sequence[str], load: Load, requests: Sequence[Sequence[int]]
) -> Row:
    # built before they are due
    inputs = [_inputs(ids) for ids in requests]
    parameters = {} if load.deadline_ms is None else {"deadline_ms": load.deadline_ms}
    async with aio.InferenceServerClient(address) as client:

        async def send(number: int) -> tuple[Outcome, str]:
            try:
                model = models[number % len(models)]
                await client.infer(model, inputs[number], outputs=_WANTED, parameters=parameters)
            except InferenceServerException as error:
                return outcome_of(error), str(error)
            return "ok", ""

        if load.rate is None:
            record = await saturate(
                len(requests), send, in_flight=load.max_waiting, seconds=load.end
            )
        else:
            record = await offer(
                load.due_times(), send, max_waiting=load.max_waiting, max_late=load.max_late
            )
    return load_row(load, models[0], record)


async def _embed(address: str, models: Sequence[str], requests: Sequence[Sequence[int]]) -> Message:
    """Return the vectors of requests that are sent at once, or the error of one."""
    async with aio.InferenceServerClient(address) as client:
        answers = [
            client.infer(models[number % len(models)], _inputs(ids), outputs=_WANTED)
            for number, ids in enumerate(requests)
        ]
        try:
            results = await asyncio.gather(*answers)
        except InferenceServerException as error:
            return {"error": str(error)}
    return {"vectors": [result.as_numpy(OUTPUT)[0].tolist() for result in results]}


def _inputs(ids: Sequence[int]) -> list[Any]:
    tensor = InferInput(INPUT, [1, len(ids)], "INT64")
    return [tensor.set_data_from_numpy(np.asarray([ids], dtype=np.int64))]


if __name__ == "__main__":
    run_worker(start)
