"""Requests that wait, in the order in which they are served.

The order is fair by served work. A request that finds `waiting` requests in the queue would be finished by a server
that shares its time equally among them after about `waiting * rows` more sequences, and that is its rank:

    rank = sequences served so far + waiting requests * rows / (1 + priority)

Requests of one row and one priority are therefore served first come, first served. A large request lets smaller
ones pass, until as many sequences have been served as it would have waited for under equal sharing: nothing starves.
A request whose deadline would be missed otherwise goes first.

Source: the order in which processor sharing would finish (Friedman and Henderson 2003, "Fairness and efficiency in
web server protocols"), with the number of competitors taken at arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count, islice

from sortedcontainers import SortedKeyList

from varlen.sequence import RequestState, Sequence


@dataclass(slots=True, eq=False)
class _Entry:
    """A request in the queue.

    Attributes:
        request: itself.
        order: sort key: urgent ones by deadline, then the others by rank; the number breaks ties.
        waiting: its sequences that wait, in order.
    """

    request: RequestState
    order: tuple[bool, float, int]
    waiting: dict[Sequence, None] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = dict.fromkeys(self.request.sequences)


class RequestQueue:
    """Requests with sequences that wait. Every operation is logarithmic in the number of requests."""

    def __init__(self) -> None:
        self._entries = SortedKeyList(key=lambda entry: entry.order)
        self._entry_of: dict[RequestState, _Entry] = {}
        # heaps of the requests with a deadline: (latest start, deadline), and (deadline, number, entry)
        self._latest_starts: list[tuple[float, float]] = []
        self._deadlines: list[tuple[float, int, _Entry]] = []
        # requests due until then go first
        self._urgent_until = -math.inf
        self._numbers = count()
        self._served = 0

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences that wait, in order."""
        return chain.from_iterable(entry.waiting for entry in self._entries)

    @property
    def requests(self) -> Iterable[RequestState]:
        """The requests, in no order."""
        return self._entry_of.keys()

    def add(self, request: RequestState, latest_start: float = math.inf) -> None:
        """Queue a request with all its sequences.

        Args:
            request: new here.
            latest_start: time from which it goes first, so that it keeps its deadline.
        """
        rows, weight = len(request.sequences), 1 + request.request.options.priority
        rank = self._served + len(self) * rows / weight
        entry = _Entry(request, (True, rank, next(self._numbers)))
        self._entry_of[request] = entry
        self._entries.add(entry)
        if math.isfinite(request.deadline):
            heappush(self._latest_starts, (latest_start, request.deadline))
            heappush(self._deadlines, (request.deadline, entry.order[2], entry))

    def promote(self, now: float) -> bool:
        """Move requests whose latest start has come to the front; return whether any request waits.

        Requests with earlier deadlines go before them.
        """
        while self._latest_starts and self._latest_starts[0][0] <= now:
            _, deadline = heappop(self._latest_starts)
            self._urgent_until = max(self._urgent_until, deadline)
        while self._deadlines and self._deadlines[0][0] <= self._urgent_until:
            deadline, number, entry = heappop(self._deadlines)
            if self._entry_of.get(entry.request) is entry:
                self._entries.remove(entry)
                entry.order = (False, deadline, number)
                self._entries.add(entry)
        return bool(self._entry_of)

    @property
    def next_promotion(self) -> float:
        """Earliest latest start of all requests; infinity if none has a deadline."""
        return self._latest_starts[0][0] if self._latest_starts else math.inf

    def first(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences from the front."""
        return list(islice(self, count))

    @property
    def is_urgent(self) -> bool:
        """Whether the first request misses its deadline unless it runs now."""
        return bool(self._entries) and not self._entries[0].order[0]

    def remove(self, sequences: Iterable[Sequence]) -> list[RequestState]:
        """Remove sequences, since they run now; return the requests that have left the queue."""
        left = []
        for sequence in sequences:
            entry = self._entry_of[sequence.request]
            del entry.waiting[sequence]
            self._served += 1
            if not entry.waiting:
                self._discard(entry)
                left.append(entry.request)
        return left

    def discard(self, request: RequestState) -> list[Sequence]:
        """Remove a request; return its sequences that waited."""
        entry = self._entry_of.get(request)
        if entry is None:
            return []
        self._served += len(entry.waiting)
        self._discard(entry)
        return list(entry.waiting)

    def _discard(self, entry: _Entry) -> None:
        del self._entry_of[entry.request]
        self._entries.remove(entry)
