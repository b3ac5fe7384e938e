"""Load on an event loop: open, where arrivals do not wait for answers, and closed, which finds out what can be served.

In an open loop a slow answer delays nobody's arrival, as with real callers; a closed one slows down with the system
and so hides how long callers would wait. All times are the loop's own clock, so that tests can run on a virtual one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Outcome: TypeAlias = Literal["ok", "refused", "failed", "unanswered"]
# Sends the request of this number; returns what became of it, and why it was not answered if it was not.
Send: TypeAlias = Callable[[int], Awaitable[tuple[Outcome, str]]]

# Between the order to offer and the first moment that a request may be due.
_LEAD_SECONDS = 0.05
_REASONS_KEPT = 3


@dataclass(slots=True)
class Sent:
    """One request that was sent; seconds since the offering began.

    Attributes:
        number: its place among the arrivals.
        due: when it should have been sent.
        sent: when it was.
        done: when its answer came, whatever it was; None if none came.
    """

    number: int
    due: float
    sent: float
    done: float | None = None
    outcome: Outcome = "unanswered"


@dataclass(frozen=True, slots=True)
class Bounds:
    """When to stop.

    Attributes:
        outstanding: most requests that wait for an answer; one that is due meanwhile is not sent.
        patience: seconds to wait for answers after the last request was sent.
        late_seconds, late_most: nothing more is sent once more than so many requests took longer than that.
    """

    outstanding: int
    patience: float = 60.0
    late_seconds: float = float("inf")
    late_most: int = 0


@dataclass(slots=True)
class Offering:
    """What became of all arrivals; seconds since it began.

    Attributes:
        sent: every request that was sent, in order.
        not_sent: when those were due that were not sent.
        end: when the last arrival was due, or when offering was given up.
        reasons: why requests failed, the first few.
    """

    sent: list[Sent] = field(default_factory=list)
    not_sent: list[float] = field(default_factory=list)
    end: float = 0.0
    reasons: list[str] = field(default_factory=list)

    @property
    def is_given_up(self) -> bool:
        """Whether nothing more was sent from `end` on."""
        return bool(self.not_sent) and self.not_sent[-1] > self.end

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` makes an offering of."""
        sent = [[one.number, one.due, one.sent, one.done, one.outcome] for one in self.sent]
        return {"sent": sent, "not_sent": self.not_sent, "end": self.end, "reasons": self.reasons}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Offering:
        """Return the offering that `to_json` was called on."""
        sent = [Sent(*one) for one in told["sent"]]
        return cls(sent, told["not_sent"], told["end"], told["reasons"])


async def offer(dues: Sequence[float], send: Send, bounds: Bounds) -> Offering:
    """Send a request at each of these times and return what became of them.

    Args:
        dues: seconds from the beginning, ascending.
        send: called once a request, none waits for another.
        bounds: when to stop.
    """
    watch = _Watch(send, bounds)
    for number, due in enumerate(dues):
        await watch.sleep_until(due)
        if watch.is_hopeless():
            watch.offering.not_sent += dues[number:]
            break
        if watch.is_full():
            watch.offering.not_sent.append(due)
        else:
            watch.start(number, due)
            # lets it be sent even if the next one is due already
            await asyncio.sleep(0)
        watch.offering.end = due
    await watch.drain()
    return watch.offering


async def saturate(count: int, send: Send, in_flight: int, seconds: float) -> Offering:
    """Keep so many requests in flight for so long; return what became of them.

    Args:
        count: requests there are to send; from the last one on they are sent again from the first.
        send: called once a request.
        in_flight: requests that wait at any time.
        seconds: after them no more are sent.
    """
    watch = _Watch(send, Bounds(in_flight))
    await watch.sleep_until(0)
    started = 0

    async def lane() -> None:
        nonlocal started
        while watch.now() < seconds:
            number, started = started, started + 1
            await watch.start(number % count, watch.now())

    await asyncio.gather(*(lane() for _ in range(in_flight)))
    watch.offering.end = seconds
    return watch.offering


class _Watch:
    """Requests under way: each is written down as it is sent and as it is answered."""

    def __init__(self, send: Send, bounds: Bounds) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time() + _LEAD_SECONDS
        self._send = send
        self._bounds = bounds
        # by order of sending; a task that is done is taken out
        self._waiting: dict[asyncio.Task[None], Sent] = {}
        self._late = 0
        self.offering = Offering()

    def now(self) -> float:
        """Return seconds since the beginning."""
        return self._loop.time() - self._begin

    async def sleep_until(self, moment: float) -> None:
        """Return at that moment, or at once if it has passed."""
        if (left := moment - self.now()) > 0:
            await asyncio.sleep(left)

    def is_full(self) -> bool:
        """Return whether as many wait as may."""
        return len(self._waiting) >= self._bounds.outstanding

    def is_hopeless(self) -> bool:
        """Return whether more requests than allowed were answered late, or are late already."""
        limit, late = self.now() - self._bounds.late_seconds, self._late
        for waiting in self._waiting.values():
            if waiting.due > limit or late > self._bounds.late_most:
                break
            # one that has just been answered counts already
            late += waiting.done is None
        return late > self._bounds.late_most

    def start(self, number: int, due: float) -> asyncio.Task[None]:
        """Send a request; the task that is returned ends with its answer."""
        record = Sent(number, due, self.now())
        self.offering.sent.append(record)
        task = self._loop.create_task(self._one(record))
        self._waiting[task] = record
        task.add_done_callback(self._waiting.pop)
        return task

    async def drain(self) -> None:
        """Wait for what is outstanding, as long as patience lasts; the rest stays unanswered."""
        left = list(self._waiting)
        if left:
            await asyncio.wait(left, timeout=self._bounds.patience)
        unanswered = [task for task in left if not task.done()]
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)

    async def _one(self, record: Sent) -> None:
        record.sent = self.now()
        outcome, reason = await self._send(record.number)
        record.outcome, record.done = outcome, self.now()
        self._late += record.done - record.due > self._bounds.late_seconds
        if outcome == "failed" and len(self.offering.reasons) < _REASONS_KEPT:
            self.offering.reasons.append(reason)
