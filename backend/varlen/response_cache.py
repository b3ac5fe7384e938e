"""Response cache: outputs that are kept and reused, in front of the engine, which does not know of it.

The unit is one prompt, so a request of many rows may find some of them here and run the rest. The key is a digest
of everything that tells the outputs of one engine apart: token ids, type ids and `normalize`. Task, model and
version are the same for all outputs of an engine, and each engine has its own cache.

Equal prompts that are in flight at one time run once: the first request leads the flight, later ones join it.
Joining never makes a request wait longer or fail for another one's reasons:

* A request joins only a flight that is at least as urgent as itself, in priority and in deadline, and that fits one
  batch. Otherwise it runs by itself, and later ones join it. So deadlines are never inherited.
* A request waits only for requests that came before it, so one that has to restart is not delayed again and again.
* A flight is cancelled once all requests that wait for it are cancelled, whichever leads it.
* If the engine refuses or drops a flight because of its leader (too large, too late, cancelled, queue full), only
  the leader fails; the others restart with the time that is left to them.
* If running it fails, all requests that wait for it fail, as in any failed batch. Errors are never kept.
"""

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
from varlen.request import Float32Array, Prompt, Reply, Request

_log = logging.getLogger(__name__)

Submit: TypeAlias = Callable[[Request, Reply], None]

# What an entry takes beside its answer's values: key, objects, and its share of the table when that is least full.
ENTRY_BYTES = 512
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class JoinLimits:
    """Limits of requests that wait for the output of another request's prompt.

    Attributes:
        max_flight_tokens: a request that has more than one sequence to run, and more tokens, cannot be joined:
            it takes several batches, and a request that needs one row of it should not wait for all.
        max_requests, max_tokens: of all requests that wait like this, which no queue counts; past them a request
            runs by itself.
    """

    max_flight_tokens: int
    max_requests: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a cache holds, and what became of the sequences that came.

    Attributes:
        held_bytes: of its entries, keys and bookkeeping included.
        entries: answers that it holds.
        hits: sequences whose answer was there.
        joined: sequences that waited for an equal one, of their own request or of another.
        misses: sequences that had to run.
        evictions: answers dropped for room or for age.
    """

    held_bytes: int = 0
    entries: int = 0
    hits: int = 0
    joined: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    """The output of one prompt, as immutable bytes."""

    values: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, row: Float32Array) -> "_Answer":
        assert row.dtype == np.float32
        # a copy: rows may be views of a whole batch
        return cls(row.tobytes(), row.shape)

    @property
    def size(self) -> int:
        """Bytes that keeping it takes."""
        return len(self.values) + ENTRY_BYTES

    def array(self) -> Float32Array:
        """Return it as an array, which is read-only and cannot be made otherwise."""
        return np.ndarray(self.shape, dtype=np.float32, buffer=self.values)


@dataclass(frozen=True, slots=True)
class _Entry:
    answer: _Answer
    since: float


@dataclass(slots=True, eq=False)
class _Caller:
    """A request and the part of its answer that is there. Changed under the cache's lock only.

    Attributes:
        request, reply: what came, and where the answer goes.
        keys: of its sequences.
        deadline: on the cache's clock; infinity if there is none.
        number: in order of arrival.
        rows: the answer so far.
        missing: rows that are not there yet.
        closed: whether it is answered.
        joined: flights of others that it waits for, with the key.
        is_counted: whether it counts as a request that waits for others.
        is_cancelled: whether its client has cancelled; once it has, it stays so.
    """

    request: Request
    reply: Reply
    keys: list[bytes]
    deadline: float
    number: int = -1
    rows: list[Float32Array | None] = field(init=False)
    missing: int = field(init=False)
    closed: bool = False
    joined: list[tuple["_Flight", bytes]] = field(default_factory=list)
    is_counted: bool = False
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.missing = len(self.keys)
        self.rows = [None] * self.missing

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key: the most urgent first."""
        return -self.request.options.priority, self.deadline, self.number

    def put(self, row: int, answer: _Answer) -> None:
        self.rows[row] = answer.array()
        self.missing -= 1


Rows: TypeAlias = dict[_Caller, list[int]]


@dataclass(slots=True, eq=False)
class _Flight:
    """Prompts of one request on their way through the engine, for which other requests may wait too.

    Attributes:
        cache: where the engine's outputs go.
        leader: the request whose priority and deadline they have.
        keys: of the prompts, in the order in which they are sent.
        waiting: requests and rows that wait for each key; a key leaves with its output.
        tokens: of all prompts.
    """

    cache: "ResponseCache"
    leader: _Caller
    keys: list[bytes] = field(default_factory=list)
    waiting: dict[bytes, list[tuple[_Caller, int]]] = field(default_factory=dict)
    tokens: int = 0

    def add(self, key: bytes, row: int) -> None:
        """Add a prompt of the leader."""
        self.keys.append(key)
        self.waiting[key] = [(self.leader, row)]
        self.tokens += self.leader.request.prompts[row].num_tokens

    def prompts(self) -> tuple[Prompt, ...]:
        """Return the prompts, each once."""
        # the leader is the first that waits for each
        rows = (waiters[0][1] for waiters in self.waiting.values())
        return tuple(self.leader.request.prompts[row] for row in rows)

    def callers(self) -> Rows:
        """Return the requests that still wait, with their rows."""
        rows: Rows = {}
        for waiters in self.waiting.values():
            for caller, row in waiters:
                if not caller.closed:
                    rows.setdefault(caller, []).append(row)
        return rows

    # the engine's reply
    def is_cancelled(self) -> bool:
        return self.cache._is_cancelled(self)

    def send(self, row: int, output: Float32Array) -> None:
        self.cache._land(self, self.keys[row], output)

    def finish(self) -> None:
        """Fail what is missing; each output was passed on when it came."""
        if self.waiting:
            self.fail(EngineError("the answer is not complete; the server's log says why"))

    def fail(self, error: Exception) -> None:
        self.cache._failed(self, error)


class ResponseCache:
    """Takes requests as the engine does, and submits what has to run. Any thread may call it."""

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
            submit: the engine's. Called without a lock held, from the threads that call `submit` here and from
                those that answer flights.
            joins: bounds of what waits for others.
            clock: seconds; deadlines and ages are counted on it.
            max_bytes: most that entries may take, keys and bookkeeping included.
            max_seconds: longest that an answer is given after it came.
        """
        self._submit = submit
        self._joins = joins
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._lock = Lock()
        # least recently used first
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes = 0
        # where a request may join; of several flights with one key, the last that started
        self._flights: dict[bytes, _Flight] = {}
        self._followers = 0
        self._follower_tokens = 0
        self._numbers = count()
        self._hits = self._misses = self._joined = self._evictions = 0

    def submit(self, request: Request, reply: Reply) -> None:
        """Answer a request: now if all of it is kept, else when the rest has run.

        Raises:
            VarlenError: the engine's, if it did not admit what is missing; the reply is left to the caller.
        """
        deadline = math.inf
        if request.options.deadline_seconds is not None:
            deadline = self._clock() + request.options.deadline_seconds
        keys = [_key(prompt, request.options.normalize) for prompt in request.prompts]
        caller = _Caller(request, reply, keys, deadline)
        error, others = self._start(caller, range(len(keys)), is_new=True)
        self._restart(others)
        if error is not None:
            raise error

    def use(self) -> CacheUse:
        """Return its contents and counts."""
        with self._lock:
            return CacheUse(
                self._bytes,
                len(self._entries),
                hits=self._hits,
                joined=self._joined,
                misses=self._misses,
                evictions=self._evictions,
            )

    def _start(
        self, caller: _Caller, rows: Iterable[int], *, is_new: bool = False
    ) -> tuple[Exception | None, Rows]:
        """Find outputs for these rows of a request, or flights that bring them, and submit the rest.

        Returns:
            Why the request is refused, or None; and the requests that had joined it meanwhile, which must restart.
        """
        with self._lock:
            if caller.closed:
                return None, {}
            if is_new:
                caller.number = next(self._numbers)
            flight = self._seek(caller, rows, is_new=is_new)
            if is_done := not caller.missing:
                self._close(caller)
        if is_done:
            _succeed(caller)
        if flight is None:
            return None, {}
        try:
            self._submit(self._request_of(flight), flight)
        except Exception as error:
            with self._lock:
                others = self._close_flight(flight)
                is_open = others.pop(caller, None) is not None
                self._close(caller)
            return (error if is_open else None), others
        return None, {}

    def _seek(self, caller: _Caller, rows: Iterable[int], *, is_new: bool) -> _Flight | None:
        """Fill in what is kept, join flights, and return a new flight for the rest, if there is any."""
        own = _Flight(self, caller)
        hits = joined = 0
        for row in rows:
            key = caller.keys[row]
            answer = self._find(key)
            if answer is not None:
                caller.put(row, answer)
                hits += 1
                continue
            flight = own if key in own.waiting else self._flights.get(key)
            if flight is not None and (flight is own or self._may_join(caller, flight)):
                flight.waiting[key].append((caller, row))
                if flight is not own:
                    caller.joined.append((flight, key))
                joined += 1
                continue
            own.add(key, row)
        if is_new:
            self._hits += hits
            self._joined += joined
            self._misses += len(own.waiting)
        if len(own.waiting) == 1 or own.tokens <= self._joins.max_flight_tokens:
            self._flights.update(dict.fromkeys(own.waiting, own))
        return own if own.waiting else None

    def _may_join(self, caller: _Caller, flight: _Flight) -> bool:
        """Return whether a request may wait for this flight, and count it as one that waits."""
        leader = flight.leader
        if (
            leader.request.options.priority < caller.request.options.priority
            or leader.deadline > caller.deadline
            or leader.number > caller.number
        ):
            return False
        if not caller.is_counted:
            tokens = self._follower_tokens + caller.request.num_tokens
            if self._followers >= self._joins.max_requests or tokens > self._joins.max_tokens:
                return False
            caller.is_counted = True
            self._followers += 1
            self._follower_tokens = tokens
        return True

    def _request_of(self, flight: _Flight) -> Request:
        """Return what the engine is to run; where no time is left, it says so."""
        leader = flight.leader
        seconds = None
        if math.isfinite(leader.deadline):
            seconds = max(0.0, leader.deadline - self._clock())
        options = replace(leader.request.options, deadline_seconds=seconds)
        return Request(flight.prompts(), options)

    def _restart(self, waiting: Rows) -> None:
        """Restart each of these requests, or fail it if it is refused."""
        # the most urgent first, so that others may join it
        queue = deque(sorted(waiting.items(), key=lambda item: item[0].urgency))
        while queue:
            caller, rows = queue.popleft()
            error, others = self._start(caller, rows)
            queue.extend(others.items())
            if error is not None:
                _fail(caller, error)

    def _is_cancelled(self, flight: _Flight) -> bool:
        with self._lock:
            callers = list(flight.callers())
        return all(_has_cancelled(caller) for caller in callers)

    def _land(self, flight: _Flight, key: bytes, output: Float32Array) -> None:
        """Keep an output, and pass it to the requests that wait for it."""
        answer = _Answer.of(output)
        done = []
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
            self._keep(key, answer)
            for caller, row in flight.waiting.pop(key, ()):
                if caller.closed:
                    continue
                caller.put(row, answer)
                if not caller.missing:
                    self._close(caller)
                    done.append(caller)
        for caller in done:
            _succeed(caller)

    def _failed(self, flight: _Flight, error: Exception) -> None:
        """Fail the requests that a failure is about; the others restart."""
        is_about_all = isinstance(error, EngineError) or not isinstance(error, VarlenError)
        with self._lock:
            waiting = self._close_flight(flight)
            failed = [
                caller
                for caller in waiting
                if is_about_all or caller is flight.leader or caller.is_cancelled
            ]
            for caller in failed:
                self._close(caller)
                del waiting[caller]
        for caller in failed:
            _fail(caller, error)
        self._restart(waiting)

    def _close_flight(self, flight: _Flight) -> Rows:
        """Close a flight to new requests; return those that wait for it."""
        for key in flight.waiting:
            if self._flights.get(key) is flight:
                del self._flights[key]
        return flight.callers()

    def _close(self, caller: _Caller) -> None:
        """Take note that a request has its answer, and remove it from the flights that it waits for."""
        caller.closed = True
        for flight, key in caller.joined:
            # a key that has landed is there no more
            waiters = flight.waiting.get(key, [])
            waiters[:] = [waiter for waiter in waiters if waiter[0] is not caller]
        caller.joined.clear()
        if caller.is_counted:
            caller.is_counted = False
            self._followers -= 1
            self._follower_tokens -= caller.request.num_tokens

    def _find(self, key: bytes) -> _Answer | None:
        """Return the answer for a key, unless it is too old."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() - entry.since > self._max_seconds:
            self._drop(key)
            self._evictions += 1
            return None
        self._entries.move_to_end(key)
        return entry.answer

    def _keep(self, key: bytes, answer: _Answer) -> None:
        """Keep an answer; evict the least recently used ones."""
        if answer.size > self._max_bytes:
            return
        if key in self._entries:
            self._drop(key)
        while self._bytes + answer.size > self._max_bytes:
            self._drop(next(iter(self._entries)))
            self._evictions += 1
        self._entries[key] = _Entry(answer, self._clock())
        self._bytes += answer.size

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._entries.pop(key).answer.size


def _key(prompt: Prompt, normalize: bool) -> bytes:
    """Return the digest of all that one engine's answer to a sequence depends on."""
    ids, types = prompt.token_ids, prompt.type_ids
    # no types are types of zero
    if types is not None and not types.any():
        types = None
    # lengths first, so that nothing runs into what follows it
    digest = blake2b(
        struct.pack("<Q??", len(ids), normalize, types is not None), digest_size=_KEY_BYTES
    )
    digest.update(ids.astype(np.int32, copy=False).tobytes())
    if types is not None:
        digest.update(types.astype(np.int32, copy=False).tobytes())
    return digest.digest()


def _has_cancelled(caller: _Caller) -> bool:
    """Return whether the client has cancelled."""
    try:
        caller.is_cancelled = caller.is_cancelled or caller.reply.is_cancelled()
    except Exception:
        _log.exception("a reply failed to say whether it is cancelled; its request goes on")
    return caller.is_cancelled


def _succeed(caller: _Caller) -> None:
    try:
        for row, output in enumerate(cast("list[Float32Array]", caller.rows)):
            caller.reply.send(row, output)
        caller.reply.finish()
    except Exception:
        _log.exception("a reply failed to take its answer")
        _fail(caller, EngineError("the answer could not be read; the server's log says why"))


def _fail(caller: _Caller, error: Exception) -> None:
    try:
        caller.reply.fail(error)
    except Exception:
        _log.exception("a reply failed to take its answer")
