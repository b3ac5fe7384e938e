"""The connections of a gateway: their limits, and their shares of the event loop.

uvicorn has neither. A new connection is admitted, and another one closed for it, unless all connections have a request
that runs: then only `/health` is answered.
"""

from __future__ import annotations

import asyncio
import heapq
import resource
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Literal, TypeAlias

# Parsing in one turn of the event loop.
_TURN_SECONDS = 0.005
# Number of refused bodies that are read together, up to 256 KiB each, to be dropped; and the time between two reads.
_DROPPED_TOGETHER = 8
_DROP_PAUSE_SECONDS = 0.004
# Connections above the limit for which `/health` is answered.
HEALTH_CONNECTIONS = 32
# Most connections that are accepted in one turn of the event loop; as many wait in the socket.
ACCEPTED_TOGETHER = 128
# Open files for all but connections of clients: the server's, logs, the listening socket.
_RESERVED_FILES = 64
# Least rate of a body, in bytes each second.
BODY_RATE = 1 << 10
# Age from which a body has a rate.
_BODY_SECONDS = 1.0
# Counts for a body that has just begun.
_BODY_START = 4 << 10
# Part of the bodies that are closed together, so that few new connections compare all bodies.
_CLOSED_PART = 16

# In the scope of a request: the server calls this function when the client leaves before its answer is complete.
LEFT = "varlen.left"

# What a connection does: `closing` has its answer, and drops the rest of its body; `stuck` has a client that reads no
# answer, or is closed once it has; `running` waits for an answer.
State: TypeAlias = Literal["closing", "idle", "body", "running", "stuck"]


def default_max_connections() -> int:
    """Return the number of connections for which the process may have open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return 1 << 16
    # those that are closed keep their files to the end of a turn
    return max(files - _RESERVED_FILES - HEALTH_CONNECTIONS - ACCEPTED_TOGETHER, 1)


class Connection(ABC):
    """What `Connections` needs of a connection.

    Attributes:
        address: address of the client, or its network in IPv6.
        is_extra: whether it is above a limit, so that only `/health` is answered.
        body_began: time of the end of the last head.
        body_bytes: bytes of the body so far.
    """

    address: str = ""
    is_extra: bool = False
    body_began: float = 0.0
    body_bytes: int = 0

    @abstractmethod
    def close_now(self) -> None:
        """Close the connection, whatever it waits for."""

    @abstractmethod
    def parse_piece(self) -> bool:
        """Parse some bytes; return whether there are more to parse now."""

    @abstractmethod
    def read_more(self) -> None:
        """Read more bytes, which are dropped."""

    def rate(self, now: float) -> float:
        """Return the bytes each second of the body; one that has just begun is fast."""
        return (self.body_bytes + _BODY_START) / (now - self.body_began + 0.1)

    def is_slow(self, now: float) -> bool:
        """Return whether the body comes more slowly than bodies may."""
        age = now - self.body_began
        return age > _BODY_SECONDS and self.body_bytes < age * BODY_RATE


class Connections:
    """The connections of one gateway.

    Args:
        max_connections: most connections; None is as many as files may be open.
        max_per_address: most connections of one address; None is half of all.
    """

    def __init__(
        self, max_connections: int | None = None, max_per_address: int | None = None
    ) -> None:
        self.max_connections = max_connections or default_max_connections()
        self.max_per_address = max_per_address or max(self.max_connections // 2, 1)
        # each in order of the time at which they came to this state
        self._by_state: dict[State, dict[Connection, None]] = {
            state: {} for state in ("closing", "idle", "body", "running", "stuck")
        }
        self._states: dict[Connection, State] = {}
        self._extra: dict[Connection, None] = {}
        self._of_address: Counter[str] = Counter()
        self._unparsed: dict[Connection, None] = {}
        self._dropping: dict[Connection, None] = {}
        self._is_scheduled, self._turn_end = False, 0.0

    def add(self, connection: Connection) -> None:
        """Add a connection, and close another one if there are too many."""
        address = connection.address
        is_address_full = self._of_address[address] >= self.max_per_address
        if is_address_full or len(self._states) - len(self._extra) >= self.max_connections:
            closed = self._closable(address if is_address_full else None)
            for each in closed:
                self._drop(each)
            if not closed:
                self._add_extra(connection)
        if not connection.is_extra:
            self._of_address[address] += 1
        self._states[connection] = "idle"
        self._by_state["idle"][connection] = None

    def put(self, connection: Connection, state: State) -> None:
        """Set what a connection does, unless it is removed."""
        old = self._states.get(connection)
        if old is not None and old != state:
            del self._by_state[old][connection]
            self._states[connection] = state
            self._by_state[state][connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection; it may be removed before."""
        self._unparsed.pop(connection, None)
        self._dropping.pop(connection, None)
        state = self._states.pop(connection, None)
        if state is None:
            return
        del self._by_state[state][connection]
        if connection.is_extra:
            del self._extra[connection]
            return
        self._of_address[connection.address] -= 1
        if not self._of_address[connection.address]:
            del self._of_address[connection.address]

    def parse(
        self, connection: Connection, loop: asyncio.AbstractEventLoop, *, at_once: bool = False
    ) -> None:
        """Parse bytes in turn with others; a piece `at_once` if this turn has time."""
        self._schedule(loop)
        has_time = not self._unparsed and time.perf_counter() < self._turn_end
        if not (at_once and has_time) or connection.parse_piece():
            self._unparsed[connection] = None

    def drop_later(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Read more of a refused body after a pause, in turn with others."""
        if not self._dropping:
            loop.call_later(_DROP_PAUSE_SECONDS, self._drop_some, loop)
        self._dropping[connection] = None

    def _drop_some(self, loop: asyncio.AbstractEventLoop) -> None:
        for connection in list(islice(self._dropping, _DROPPED_TOGETHER)):
            del self._dropping[connection]
            connection.read_more()
        if self._dropping:
            loop.call_later(_DROP_PAUSE_SECONDS, self._drop_some, loop)

    def _parse(self, loop: asyncio.AbstractEventLoop) -> None:
        """Parse pieces of the connections in turn; the rest in the next turn."""
        self._is_scheduled = False
        if self._unparsed:
            self._schedule(loop)
        while self._unparsed and time.perf_counter() < self._turn_end:
            connection = next(iter(self._unparsed))
            del self._unparsed[connection]
            if connection.parse_piece():
                self._unparsed[connection] = None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a turn of parsing, and schedule the next one, unless this is done."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._turn_end = time.perf_counter() + _TURN_SECONDS
            loop.call_soon(self._parse, loop)

    def _closable(self, address: str | None) -> list[Connection]:
        """Return the connections that are closed for a new one, of an address or all."""
        now = time.monotonic()
        bodies = list(self._of(address, self._by_state["body"]))
        count = -(-len(bodies) // _CLOSED_PART)
        slowest = heapq.nsmallest(count, bodies, key=lambda each: each.rate(now))
        return (
            self._first(address, "closing")
            or [each for each in slowest if each.is_slow(now)]
            or self._first(address, "idle")
            or slowest[:1]
            or self._first(address, "stuck")
        )

    def _first(self, address: str | None, state: State) -> list[Connection]:
        first = next(iter(self._of(address, self._by_state[state])), None)
        return [] if first is None else [first]

    def _of(self, address: str | None, connections: Iterable[Connection]) -> Iterable[Connection]:
        return (
            each
            for each in connections
            if not each.is_extra and (address is None or each.address == address)
        )

    def _add_extra(self, connection: Connection) -> None:
        if len(self._extra) >= HEALTH_CONNECTIONS:
            self._drop(next(iter(self._extra)))
        connection.is_extra = True
        self._extra[connection] = None

    def _drop(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close_now()
