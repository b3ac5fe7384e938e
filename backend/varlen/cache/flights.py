"""Flights: prompts of one request in the engine, whose answers other requests may wait for.

A request joins only a flight that is at least as urgent as itself, in priority and in deadline, that came before it,
and that fits one batch. The caller guards everything here with one lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from varlen.cache.answer_store import CachedAnswer
from varlen.request.request import Float32Array, Prompt, Reply, Request


@dataclass(frozen=True, slots=True)
class JoinLimits:
    """Limits of requests that wait for the output of another request's prompt.

    Attributes:
        max_flight_tokens: largest request of several sequences that others may join, in tokens; a larger one takes
            several batches, and a request that needs one row of it should not wait for all.
        max_requests, max_tokens: limits of all requests that wait like this, which no queue counts; beyond them a
            request runs by itself.
    """

    max_flight_tokens: int
    max_requests: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class Pending:
    """A request and the available part of its answer.

    Attributes:
        deadline: time on the cache's clock; infinity if there is none.
        rows: the answer so far.
        missing: number of rows without an answer.
        joined: flights of others that it waits for, with the key.
        is_counted: whether it counts as a request that waits for others.
        is_cancelled: whether its client has cancelled; stays true.
    """

    request: Request
    reply: Reply
    keys: list[bytes]
    deadline: float
    number: int = -1
    rows: list[Float32Array | None] = field(init=False)
    missing: int = field(init=False)
    closed: bool = False
    joined: list[tuple[Flight, bytes]] = field(default_factory=list)
    is_counted: bool = False
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.missing = len(self.keys)
        self.rows = [None] * self.missing

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key: the most urgent first."""
        return -self.request.options.priority, self.deadline, self.number

    def put(self, row: int, answer: CachedAnswer) -> None:
        self.rows[row] = answer.array()
        self.missing -= 1


Rows: TypeAlias = dict[Pending, list[int]]


@dataclass(slots=True, eq=False)
class Flight:
    """Prompts of one request in the engine; other requests may join them.

    Attributes:
        leader: the request whose priority and deadline they have.
        keys: one per prompt, in the order in which they are sent.
        waiting: requests and rows that wait for each key; a key leaves with its output.
    """

    leader: Pending
    keys: list[bytes] = field(default_factory=list)
    waiting: dict[bytes, list[tuple[Pending, int]]] = field(default_factory=dict)
    tokens: int = 0

    def add(self, key: bytes, row: int) -> None:
        self.keys.append(key)
        self.waiting[key] = [(self.leader, row)]
        self.tokens += self.leader.request.prompts[row].num_tokens

    def prompts(self) -> tuple[Prompt, ...]:
        # the leader is the first that waits for each
        rows = (waiters[0][1] for waiters in self.waiting.values())
        return tuple(self.leader.request.prompts[row] for row in rows)

    def pending_requests(self) -> Rows:
        """Return the requests that still wait, with their rows."""
        rows: Rows = {}
        for waiters in self.waiting.values():
            for pending, row in waiters:
                if not pending.closed:
                    rows.setdefault(pending, []).append(row)
        return rows


class Flights:
    """The flights that requests may join, and the requests that have joined one."""

    def __init__(self, limits: JoinLimits) -> None:
        self._limits = limits
        # of several with one key, the latest
        self._by_key: dict[bytes, Flight] = {}
        self._followers = 0
        self._follower_tokens = 0

    def add(self, flight: Flight) -> None:
        """Let requests join a flight, if it fits one batch."""
        if len(flight.waiting) == 1 or flight.tokens <= self._limits.max_flight_tokens:
            self._by_key.update(dict.fromkeys(flight.waiting, flight))

    def join(self, pending: Pending, row: int) -> bool:
        """Let a row wait for the answer of another request; return whether it does."""
        key = pending.keys[row]
        flight = self._by_key.get(key)
        if flight is None or not self._may_join(pending, flight):
            return False
        if not pending.is_counted:
            pending.is_counted = True
            self._followers += 1
            self._follower_tokens += pending.request.num_tokens
        flight.waiting[key].append((pending, row))
        pending.joined.append((flight, key))
        return True

    def discard(self, flight: Flight, keys: Iterable[bytes]) -> None:
        """Let no more requests wait for these keys of a flight."""
        for key in keys:
            if self._by_key.get(key) is flight:
                del self._by_key[key]

    def leave(self, pending: Pending) -> None:
        """Remove a request from the flights that it has joined."""
        for flight, key in pending.joined:
            # a delivered key is gone
            waiters = flight.waiting.get(key, [])
            waiters[:] = [waiter for waiter in waiters if waiter[0] is not pending]
        pending.joined.clear()
        if pending.is_counted:
            pending.is_counted = False
            self._followers -= 1
            self._follower_tokens -= pending.request.num_tokens

    def _may_join(self, pending: Pending, flight: Flight) -> bool:
        leader = flight.leader
        if (
            leader.request.options.priority < pending.request.options.priority
            or leader.deadline > pending.deadline
            or leader.number > pending.number
        ):
            return False
        tokens = self._follower_tokens + pending.request.num_tokens
        has_room = self._followers < self._limits.max_requests and tokens <= self._limits.max_tokens
        return pending.is_counted or has_room
