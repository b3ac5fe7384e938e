"""Requests in an open loop, where arrivals wait for no answers, or closed.

In an open loop a slow answer delays no arrival, as with real callers. A closed loop slows down with the system and
hides how long callers would wait; it measures capacity. All times are the loop's own clock, so that tests can run on
a virtual one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["ok", "refused", "failed", "unanswered"]
# Sends the request of a number; returns its outcome and the reason of a failure.
Send: TypeAlias = Callable[[int], Awaitable[tuple[Outcome, str]]]

# A request that takes longer is late.
LATE_SECONDS = 0.5
# Time to wait for answers after the last request was sent.
_PATIENCE_SECONDS = 60.0
# From the start of a load to the first moment at which a request may be due.
_LEAD_SECONDS = 0.05
_REASONS_KEPT = 3


@dataclass(slots=True)
class RequestRecord:
    """One request that was sent; times in seconds since the load began."""

    # position among the arrivals
    number: int
    due: float
    sent: float
    # when it was answered, with any outcome; None: never
    done: float | None = None
    outcome: Outcome = "unanswered"

    def latency(self, *, since_sent: bool = False) -> float:
        """Return the seconds to its answer, since it was due or sent."""
        assert self.done is not None, "answered"
        return self.done - (self.sent if since_sent else self.due)


@dataclass(slots=True)
class LoadRecord:
    """All arrivals of a load; times in seconds since it began."""

    # in the order of sending
    requests: list[RequestRecord] = field(default_factory=list)
    # due times of the requests that were not sent
    not_sent: list[float] = field(default_factory=list)
    # when the last arrival was due, or when the load was given up
    end: float = 0.0
    # why the first failed requests failed
    reasons: list[str] = field(default_factory=list)

    @property
    def is_given_up(self) -> bool:
        """Whether nothing was sent after `end`."""
        return bool(self.not_sent) and self.not_sent[-1] > self.end


async def offer(
    due_times: Sequence[float], send: Send, *, max_waiting: int, max_late: int | None = None
) -> LoadRecord:
    """Send a request at each time, whether or not earlier ones are answered.

    Args:
        due_times: seconds from the beginning, ascending.
        max_waiting: limit on requests without an answer; a request that is due beyond it is not sent.
        max_late: the load is given up once more requests are late; None: never.
    """
    flight = _Flight(send)
    for number, due in enumerate(due_times):
        await flight.sleep_until(due)
        if max_late is not None and flight.late(max_late) > max_late:
            flight.record.not_sent += due_times[number:]
            break
        if len(flight.waiting) >= max_waiting:
            flight.record.not_sent.append(due)
        else:
            flight.start(number, due)
            # the task sends the request now, even if the next one is due already
            await asyncio.sleep(0)
        flight.record.end = due
    await flight.drain()
    return flight.record


async def saturate(count: int, send: Send, *, in_flight: int, seconds: float) -> LoadRecord:
    """Keep `in_flight` requests without an answer for some seconds; the `count` requests repeat."""
    flight = _Flight(send)
    await flight.sleep_until(0)
    started = 0

    async def call_repeatedly() -> None:
        nonlocal started
        while flight.now() < seconds:
            number, started = started, started + 1
            await flight.start(number % count, flight.now())

    await asyncio.gather(*(call_repeatedly() for _ in range(in_flight)))
    flight.record.end = seconds
    return flight.record


class _Flight:
    """Requests in flight and their records."""

    def __init__(self, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time() + _LEAD_SECONDS
        self._send = send
        self._late = 0
        # in the order of sending; a task that is done is removed
        self.waiting: dict[asyncio.Task[None], RequestRecord] = {}
        self.record = LoadRecord()

    def now(self) -> float:
        return self._loop.time() - self._begin

    async def sleep_until(self, moment: float) -> None:
        if (left := moment - self.now()) > 0:
            await asyncio.sleep(left)

    def late(self, enough: int) -> int:
        """Return how many requests are or were late; counting stops above `enough`."""
        latest_due, late = self.now() - LATE_SECONDS, self._late
        for request in self.waiting.values():
            if request.due > latest_due or late > enough:
                break
            # a request that has just been answered is in `_late`
            late += request.done is None
        return late

    def start(self, number: int, due: float) -> asyncio.Task[None]:
        """Send a request; the returned task ends with its answer."""
        request = RequestRecord(number, due, self.now())
        self.record.requests.append(request)
        task = self._loop.create_task(self._send_one(request))
        self.waiting[task] = request
        task.add_done_callback(self.waiting.pop)
        return task

    async def drain(self) -> None:
        """Wait for answers for a limited time; cancel the other requests."""
        left = list(self.waiting)
        if left:
            await asyncio.wait(left, timeout=_PATIENCE_SECONDS)
        unanswered = [task for task in left if not task.done()]
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)

    async def _send_one(self, request: RequestRecord) -> None:
        request.sent = self.now()
        outcome, reason = await self._send(request.number)
        request.outcome, request.done = outcome, self.now()
        self._late += request.latency() > LATE_SECONDS
        if outcome == "failed" and len(self.record.reasons) < _REASONS_KEPT:
            self.record.reasons.append(reason)
