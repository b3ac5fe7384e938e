"""Response cache: stores and reuses outputs, in front of the engine.

The unit is one prompt, so a request of many rows may find some of them here and run the rest. The key is a digest
of everything that tells the outputs of one engine apart: all parts of a prompt, and `normalize`; the `cache_salt` of
the request too: requests with different salts share no answer. The least recently used answers make room for new ones.

Equal prompts that are in flight at one time run once: the first request leads the flight, later ones join it. A request
joins only a flight that is at least as urgent as itself, that came before it, and that fits one batch. A failure of the
leader is its own, and the others restart; a failure of the run is everyone's. A flight is cancelled once all of its
requests are. docs/decisions/0013-response-cache.md has the reasons.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from threading import Lock
from typing import TypeAlias, cast

import numpy as np

from varlen.errors import EngineError, VarlenError
from varlen.request.request import Float32Array, Output, Prompt, Reply, Request, RequestOptions

# Bytes of an entry beside its answer's values: key, objects, and its part of the hash table at its emptiest.
ENTRY_BYTES = 512
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The output of one prompt, as immutable bytes."""

    values: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, row: Float32Array) -> CachedAnswer:
        assert row.dtype == np.float32
        # rows may be views of a whole batch
        return cls(row.tobytes(), row.shape)

    @property
    def size(self) -> int:
        return len(self.values) + ENTRY_BYTES

    def array(self) -> Float32Array:
        """Return a read-only array that cannot be made writable."""
        return np.ndarray(self.shape, dtype=np.float32, buffer=self.values)


@dataclass(frozen=True, slots=True)
class _Entry:
    answer: CachedAnswer
    since: float


class AnswerStore:
    """Answers by key. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], *, max_bytes: int, max_seconds: float) -> None:
        """Make an empty store.

        Args:
            max_bytes: largest size of all entries, keys and bookkeeping included.
            max_seconds: largest age of an answer.
        """
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        # least recently used first
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.held_bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> CachedAnswer | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() - entry.since > self._max_seconds:
            self._drop(key)
            self.evictions += 1
            return None
        self._entries.move_to_end(key)
        return entry.answer

    def put(self, key: bytes, answer: CachedAnswer) -> None:
        """Store an answer; evict the least recently used ones."""
        if answer.size > self._max_bytes:
            return
        if key in self._entries:
            self._drop(key)
        while self.held_bytes + answer.size > self._max_bytes:
            self._drop(next(iter(self._entries)))
            self.evictions += 1
        self._entries[key] = _Entry(answer, self._clock())
        self.held_bytes += answer.size

    def _drop(self, key: bytes) -> None:
        self.held_bytes -= self._entries.pop(key).answer.size


def answer_key(prompt: Prompt, options: RequestOptions) -> bytes:
    """Return a digest of everything that decides the answer to a prompt, with the salt."""
    ids, types = prompt.token_ids, prompt.type_ids
    # no types are types of zero
    if types is not None and not types.any():
        types = None
    payload = prompt.payload
    # lengths first, so that nothing runs into what follows it
    digest = blake2b(
        struct.pack(
            "<Q??Qq",
            len(ids),
            options.normalize,
            types is not None,
            payload.count or 0,
            -1 if payload.tokens is None else len(payload.tokens),
        ),
        digest_size=_KEY_BYTES,
    )
    for numbers in (ids, types, payload.tokens):
        if numbers is not None:
            digest.update(numbers.astype(np.int32, copy=False).tobytes())
    # no name of a task or an adapter has a comma; JSON may hold half a surrogate pair
    names = ",".join((*options.outputs, options.cache_scope))
    digest.update(names.encode(errors="surrogatepass"))
    return digest.digest()


@dataclass(frozen=True, slots=True)
class JoinLimits:
    """Limits of requests that wait for the output of another request's prompt.

    Attributes:
        max_flight_tokens: largest request of several sequences that others may join, in tokens; a larger one takes
            several batches.
        max_requests, max_tokens: limits of all requests that wait like this; beyond them a request runs by itself.
    """

    max_flight_tokens: int
    max_requests: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class Pending:
    """A request and the available part of its answer.

    Attributes:
        deadline: time on the cache's clock; infinity if there is none.
        joined: flights of others that it waits for, with the key.
        is_counted: whether it counts as a request that waits for others.
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
        self._flights.discard(flight, flight.waiting)
        return flight.pending_requests()

    def _close(self, pending: Pending) -> None:
        pending.closed = True
        self._flights.leave(pending)


@dataclass(frozen=True, slots=True)
class _FlightReply:
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
