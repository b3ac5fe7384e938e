"""Requests and streams to two replicas while a process of the first one is killed."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from varlen_bench.harness.generator import LoadRecord, Outcome, RequestRecord, offer, saturate
from varlen_bench.harness.summary import percentile_ms
from varlen_client import AsyncClient, RetryPolicy, VarlenClientError

# Requests without an answer of an open loop, and of the closed loop that measures capacity.
_MOST_WAITING = 4000
_IN_FLIGHT = 16
# The fault comes after this share of the requests.
_STRIKES_AFTER = 0.1


@dataclass(frozen=True, slots=True)
class Route:
    """A way of requests to the replicas.

    Attributes:
        name: name of the proxy, or "client" for our client with the addresses of both replicas.
        urls: addresses of one client.
        retry: policy of the client; without retries behind a proxy, which replays.
    """

    name: str
    urls: tuple[str, ...]
    retry: RetryPolicy


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the CSV.

    Attributes:
        event: process that was killed; none for a load without a fault.
        path: name of the route.
        offered: requests/s that were sent; None for streams, which begin together.
        answered: number of requests that were answered.
        failed: number of requests that failed.
        failed_later: number of failed requests that were sent after the fault.
        longest_failure_s: seconds from the fault to the last failure; None without failures.
        spread: share of the requests that the first replica ran; None with a fault.
        p50_ms: median latency since requests were due.
        p99_ms: 99th percentile of the latency.
        longest_ms: longest latency.
        note: first failures.
    """

    event: str
    path: str
    offered: float | None
    answered: int
    failed: int
    failed_later: int
    longest_failure_s: float | None
    spread: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    longest_ms: float | None = None
    note: str = ""


async def measure_capacity(
    route: Route, model: str, requests: Sequence[Sequence[int]], seconds: float
) -> float:
    """Return the requests/s of a closed loop through a route."""
    async with AsyncClient(route.urls, model, retry=route.retry) as client:
        send = functools.partial(_send, client, requests)
        await saturate(len(requests), send, in_flight=_IN_FLIGHT, seconds=seconds / 2)
        record = await saturate(len(requests), send, in_flight=_IN_FLIGHT, seconds=seconds)
    return sum(each.outcome == "ok" for each in record.requests) / seconds


async def send_through_fault(
    route: Route,
    model: str,
    requests: Sequence[Sequence[int]],
    due_times: Sequence[float],
    strike: Callable[[], None] | None,
) -> tuple[LoadRecord, float | None]:
    """Return the record of an open loop, and the time of the fault in it.

    Args:
        strike: kills a process after a tenth of the requests, in a thread; None for no fault.
    """
    struck_at: float | None = None

    async def strike_in_time() -> None:
        nonlocal struck_at
        if strike is not None:
            await asyncio.sleep(due_times[int(_STRIKES_AFTER * len(due_times))])
            struck_at = clock() - begin
            await asyncio.to_thread(strike)

    async with AsyncClient(route.urls, model, retry=route.retry) as client:
        # the connection and the model's info are not part of the load
        await client.embed([requests[0]])
        clock = asyncio.get_running_loop().time
        begin = clock()
        record, _ = await asyncio.gather(
            offer(due_times, functools.partial(_send, client, requests), max_waiting=_MOST_WAITING),
            strike_in_time(),
        )
    return record, struck_at


async def stream_through_fault(
    route: Route, model: str, *, streams: int, max_tokens: int, strike: Callable[[], None]
) -> tuple[list[RequestRecord], float, list[str]]:
    """Return the records of streams, the time of the fault, and the errors.

    The fault comes after the first part of every stream.
    """
    clock = asyncio.get_running_loop().time
    begin, begun = clock(), asyncio.Semaphore(0)
    records = [RequestRecord(number, 0.0, 0.0) for number in range(streams)]
    reasons: list[str] = []

    async def read(record: RequestRecord) -> None:
        parts = 0
        try:
            stream = client.stream(
                [5, 6, 7], max_tokens=max_tokens, ignore_eos=True, seed=record.number
            )
            async with aclosing(stream):
                async for _ in stream:
                    parts += 1
                    if parts == 1:
                        begun.release()
            record.outcome = "ok"
        except VarlenClientError as error:
            record.outcome = "failed"
            reasons.append(f"{type(error).__name__}: {error}")
        record.done = clock() - begin

    async with AsyncClient(route.urls, model, retry=route.retry) as client:
        tasks = [asyncio.ensure_future(read(record)) for record in records]
        for _ in records:
            await begun.acquire()
        struck_at = clock() - begin
        await asyncio.to_thread(strike)
        await asyncio.gather(*tasks)
    return records, struck_at, reasons


def load_row(
    event: str,
    route: Route,
    records: Sequence[RequestRecord],
    struck_at: float | None,
    reasons: Sequence[str],
    *,
    offered: float | None = None,
    spread: float | None = None,
) -> Row:
    """Return the row of a load.

    Args:
        struck_at: time of the fault; None if there was none.
    """
    outcomes = Counter(each.outcome for each in records)
    failed = [each for each in records if each.outcome != "ok"]
    ends = [each.done - (struck_at or 0.0) for each in failed if each.done is not None]
    latencies = [each.latency() for each in records if each.outcome == "ok"]
    unanswered = outcomes["unanswered"]
    notes = [f"{unanswered} were never answered"] if unanswered else []
    return Row(
        event,
        route.name,
        offered,
        answered=outcomes["ok"],
        failed=len(failed),
        failed_later=sum(each.sent > (struck_at or 0.0) for each in failed),
        longest_failure_s=max(ends, default=None),
        spread=spread,
        p50_ms=percentile_ms(latencies, 50),
        p99_ms=percentile_ms(latencies, 99),
        longest_ms=1000 * max(latencies) if latencies else None,
        note="; ".join([*notes, *reasons[:1]]),
    )


async def _send(
    client: AsyncClient, requests: Sequence[Sequence[int]], number: int
) -> tuple[Outcome, str]:
    try:
        await client.embed([requests[number]])
    except VarlenClientError as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "ok", ""
