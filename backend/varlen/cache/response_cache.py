"""Response cache: stores and reuses outputs, in front of the engine.

The unit is one prompt, so a request of many rows may find some of them here and run the rest. The key is a digest
of everything that tells the outputs of one engine apart: all parts of a prompt, and `normalize`. Task, model and
version are the same for all outputs of an engine, and each engine has its own cache. The key has the `cache_salt` of
the request too: requests with different salts share no answer.

Equal prompts that are in flight at one time run once: the first request leads the flight, later ones join it.
Joining never makes a request wait longer or fail for another one's reasons:

* A request joins only a flight that is at least as urgent as itself, in priority and in deadline, and that fits one
  batch. Otherwise it runs by itself, and later ones join it. So deadlines are never inherited.
* A request waits only for requests that came before it, so one that has to restart is not delayed again and again.
* A flight is cancelled once all requests that wait for it are cancelled, leader or not.
* If the engine refuses or drops a flight because of its leader (too large, too late, cancelled, queue full), only
  the leader fails; the others restart with the time that is left to them.
* If running it fails, all requests that wait for it fail, as in any failed batch. Errors are never stored.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from threading import Lock
from typing import TypeAlias, cast

import numpy as np

from varlen.cache.answer_store import AnswerStore, CachedAnswer, answer_key
from varlen.cache.flights import Flight, Flights, JoinLimits, Pending, Rows
from varlen.errors import EngineError, VarlenError
from varlen.request.request import Float32Array, Output, Reply, Request

_log = logging.getLogger(__name__)

Submit: TypeAlias = Callable[[Request, Reply], None]


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Contents and counters of a cache.

    Attributes:
        held_bytes: size of its entries, keys and bookkeeping included.
        hits: sequences whose answer was stored.
        joined: sequences that waited for an equal one, of their own request or of another.
        misses: sequences that had to run.
        evictions: answers dropped for size or age.
    """

    held_bytes: int = 0
    entries: int = 0
    hits: int = 0
    joined: int = 0
    misses: int = 0
    evictions: int = 0


class ResponseCache:
    """Answers requests from stored outputs, and submits the rest to the engine. Thread-safe."""

    def __init__(
        self,
        submit: Submit,
        joins: JoinLimits,
        clock: Callable[[], float],
        *,
        max_bytes: int,
        max_seconds: float = math.inf,
    ) -> None:
        """Make an empty cache.

        Args:
            submit: the engine's method. Called without a lock held, from the threads that call `submit` here and from
                those that answer flights.
            max_bytes: largest size of all entries, keys and bookkeeping included.
            max_seconds: largest age of an answer.
        """
        self._submit = submit
        self._clock = clock
        self._lock = Lock()
        self._store = AnswerStore(clock, max_bytes=max_bytes, max_seconds=max_seconds)
        self._flights = Flights(joins)
        self._numbers = count()
        self._hits = self._misses = self._joined = 0

    def submit(self, request: Request, reply: Reply) -> None:
        """Answer a request: at once from stored outputs, or after the rest has run.

        Raises:
            VarlenError: the engine did not admit the missing rows; the caller answers the request.
        """
        now = self._clock()
        # a part of it that runs later, or again, has come with it
        request = replace(request, arrival=request.arrived(now))
        deadline = request.deadline(now)
        keys = [answer_key(prompt, request.options) for prompt in request.prompts]
        pending = Pending(request, reply, keys, deadline)
        error, others = self._start(pending, range(len(keys)), is_new=True)
        self._restart(others)
        if error is not None:
            raise error

    def use(self) -> CacheUse:
        with self._lock:
            return CacheUse(
                self._store.held_bytes,
                len(self._store),
                hits=self._hits,
                joined=self._joined,
                misses=self._misses,
                evictions=self._store.evictions,
            )

    def _start(
        self, pending: Pending, rows: Iterable[int], *, is_new: bool = False
    ) -> tuple[Exception | None, Rows]:
        """Look up rows of a request, join flights for others, and submit the rest.

        Returns:
            Why the request is refused, or None; and the requests that have joined its flight since, which must restart.
        """
        with self._lock:
            if pending.closed:
                return None, {}
            if is_new:
                pending.number = next(self._numbers)
            flight = self._fill_or_join(pending, rows, is_new=is_new)
            if is_done := not pending.missing:
                self._close(pending)
        if is_done:
            _succeed(pending)
        if flight is None:
            return None, {}
        try:
            # it came when its leader did
            part = replace(pending.request, prompts=flight.prompts())
            self._submit(part, _FlightReply(self, flight))
        except Exception as error:
            with self._lock:
                others = self._close_flight(flight)
                is_open = others.pop(pending, None) is not None
                self._close(pending)
            return (error if is_open else None), others
        return None, {}

    def _fill_or_join(
        self, pending: Pending, rows: Iterable[int], *, is_new: bool
    ) -> Flight | None:
        """Fill in stored outputs, join flights, and return a flight of the rest."""
        own = Flight(pending)
        hits = joined = 0
        for row in rows:
            key = pending.keys[row]
            answer = self._store.get(key)
            if answer is not None:
                pending.put(row, answer)
                hits += 1
                continue
            if key in own.waiting:
                own.waiting[key].append((pending, row))
                joined += 1
            elif self._flights.join(pending, row):
                joined += 1
            else:
                own.add(key, row)
        if is_new:
            self._hits += hits
            self._joined += joined
            self._misses += len(own.waiting)
        self._flights.add(own)
        return own if own.waiting else None

    def _restart(self, waiting: Rows) -> None:
        # the most urgent first, so that others may join it
        queue = deque(sorted(waiting.items(), key=lambda item: item[0].urgency))
        while queue:
            pending, rows = queue.popleft()
            error, others = self._start(pending, rows)
            queue.extend(others.items())
            if error is not None:
                _fail(pending, error)

    def _is_cancelled(self, flight: Flight) -> bool:
        with self._lock:
            pending_requests = list(flight.pending_requests())
        return all(_has_cancelled(pending) for pending in pending_requests)

    def _deliver(self, flight: Flight, key: bytes, output: Float32Array) -> None:
        answer = CachedAnswer.of(output)
        done = []
        with self._lock:
            self._flights.discard(flight, [key])
            self._store.put(key, answer)
            for pending, row in flight.waiting.pop(key, ()):
                if pending.closed:
                    continue
                pending.put(row, answer)
                if not pending.missing:
                    self._close(pending)
                    done.append(pending)
        for pending in done:
            _succeed(pending)

    def _fail_flight(self, flight: Flight, error: Exception) -> None:
        """Fail the requests that a failure is about; the others restart."""
        is_about_all = isinstance(error, EngineError) or not isinstance(error, VarlenError)
        with self._lock:
            waiting = self._close_flight(flight)
            failed = [
                pending
                for pending in waiting
                if is_about_all or pending is flight.leader or pending.is_cancelled
            ]
            for pending in failed:
                self._close(pending)
                del waiting[pending]
        for pending in failed:
            _fail(pending, error)
        self._restart(waiting)

    def _close_flight(self, flight: Flight) -> Rows:
        """Close a flight to new requests; return those that wait for it."""
        self._flights.discard(flight, flight.waiting)
        return flight.pending_requests()

    def _close(self, pending: Pending) -> None:
        pending.closed = True
        self._flights.leave(pending)


@dataclass(frozen=True, slots=True)
class _FlightReply:
    """Passes the engine's answer to a flight on to the cache."""

    cache: ResponseCache
    flight: Flight

    def is_cancelled(self) -> bool:
        return self.cache._is_cancelled(self.flight)

    def send(self, row: int, output: Output) -> None:
        assert isinstance(output, np.ndarray)
        self.cache._deliver(self.flight, self.flight.keys[row], output)

    def finish(self) -> None:
        if self.flight.waiting:
            self.fail(EngineError("the answer is not complete; the server's log says why"))

    def fail(self, error: Exception) -> None:
        self.cache._fail_flight(self.flight, error)


def _has_cancelled(pending: Pending) -> bool:
    try:
        pending.is_cancelled = pending.is_cancelled or pending.reply.is_cancelled()
    except Exception:
        _log.exception("checking for cancellation failed; the request continues")
    return pending.is_cancelled


def _succeed(pending: Pending) -> None:
    try:
        for row, output in enumerate(cast("list[Float32Array]", pending.rows)):
            pending.reply.send(row, output)
        pending.reply.finish()
    except Exception:
        _log.exception("sending an answer failed; its request fails")
        _fail(pending, EngineError("the answer could not be delivered; the server's log says why"))


def _fail(pending: Pending, error: Exception) -> None:
    try:
        pending.reply.fail(error)
    except Exception:
        _log.exception("sending an error failed")
