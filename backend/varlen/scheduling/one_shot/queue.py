"""Requests that wait, in the order in which they are served.

The order is fair by served work (`admission`). Work is counted in sequences, or in tokens, which lets short requests
pass long ones. The rank of a request grows by its own sequences that are served. A request whose deadline would be
missed otherwise goes first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Literal, TypeAlias

from sortedcontainers import SortedKeyList

from varlen.scheduling.admission import RANK_UNIT, FairShare
from varlen.scheduling.batch import RequestState, SequenceState

# What is fair is counted in.
WorkUnit: TypeAlias = Literal["sequences", "tokens"]

# More than usually come while a queue drains.
_RECENT_ARRIVALS = 1024


@dataclass(slots=True, eq=False)
class _Entry:
    """A request in the queue.

    Attributes:
        rank: place in the order of fair service; see `FairShare.enter`.
        latest_start: time from which it goes first.
        is_urgent: whether that time has come.
        waiting: its sequences that wait, in order.
    """

    request: RequestState
    number: int
    rank: int
    latest_start: float
    is_urgent: bool = False
    waiting: OrderedDict[SequenceState, None] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = OrderedDict.fromkeys(self.request.sequences)

    @property
    def order(self) -> tuple[bool, float, int]:
        key = self.request.deadline if self.is_urgent else self.rank
        return not self.is_urgent, key, self.number


class RequestQueue:
    """Requests with sequences that wait. Every operation is logarithmic in the number of requests.

    Attributes:
        waiting_tokens: tokens of the sequences that wait.
        now: time for which it is in order, in seconds of the engine's clock: the time of the last `promote`.
    """

    def __init__(self, unit: WorkUnit = "sequences") -> None:
        """Make an empty queue whose order is fair by served sequences, or by served tokens."""
        self._unit = unit
        self._entries = SortedKeyList(key=lambda entry: entry.order)
        self._entry_of: dict[RequestState, _Entry] = {}
        # requests with a deadline that are not urgent
        self._by_latest_start = SortedKeyList(key=lambda entry: (entry.latest_start, entry.number))
        self._numbers = count()
        # times of the latest arrivals, of waiting requests and others
        self._arrivals: deque[float] = deque(maxlen=_RECENT_ARRIVALS)
        self._share = FairShare()
        self.waiting_tokens = 0
        self.now = -math.inf

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[SequenceState]:
        """Yield the sequences that wait, in order."""
        return chain.from_iterable(entry.waiting for entry in self._entries)

    @property
    def requests(self) -> Iterable[RequestState]:
        return self._entry_of.keys()

    def add(self, request: RequestState, latest_start: float = math.inf) -> None:
        """Queue a request with all its sequences.

        Args:
            request: new here.
            latest_start: time from which it goes first, so that it keeps its deadline.
        """
        own, options = self._work_of(request.sequences), request.request.options
        rank = self._share.enter(options.tenant, own, 1 + options.priority)
        entry = _Entry(request, next(self._numbers), rank, latest_start)
        self._entry_of[request] = entry
        self._entries.add(entry)
        # texts of an earlier arrival may have been tokenized later
        latest = self._arrivals[-1] if self._arrivals else request.arrival
        self._arrivals.append(max(latest, request.arrival))
        self.waiting_tokens += _tokens_of(request.sequences)
        if math.isfinite(latest_start):
            self._by_latest_start.add(entry)

    def promote(self, now: float) -> bool:
        """Move requests whose latest start has come to the front; return whether any request waits.

        Requests with earlier deadlines go before them.
        """
        self.now = now
        if self._by_latest_start and self.next_promotion <= now:
            due = self._by_latest_start.irange_key(max_key=(now, math.inf))
            last_deadline = max(entry.request.deadline for entry in due)
            urgent = [e for e in self._by_latest_start if e.request.deadline <= last_deadline]
            for entry in urgent:
                self._entries.remove(entry)
                self._by_latest_start.remove(entry)
                entry.is_urgent = True
                self._entries.add(entry)
        return bool(self._entry_of)

    def arrivals_since(self, time: float) -> int:
        """Return how many requests have come since, waiting or not; at most 1,024."""
        return len(self._arrivals) - bisect_left(self._arrivals, time)

    def waiting_rows(self, request: RequestState) -> int:
        return len(self._entry_of[request].waiting)

    @property
    def next_promotion(self) -> float:
        """Earliest latest start of all requests; infinity if none has a deadline."""
        return self._by_latest_start[0].latest_start if self._by_latest_start else math.inf

    def first(self, count: int) -> list[SequenceState]:
        """Return up to `count` sequences from the front."""
        return list(islice(self, count))

    @property
    def is_urgent(self) -> bool:
        """Whether the first request misses its deadline unless it runs now."""
        return bool(self._entries) and self._entries[0].is_urgent

    def remove(self, sequences: Iterable[SequenceState]) -> int:
        """Remove sequences that start to run; return how many requests left the queue."""
        left = 0
        for sequence in sequences:
            entry = self._entry_of[sequence.request]
            del entry.waiting[sequence]
            self._mark_served(entry, [sequence])
            if not entry.waiting:
                self._discard(entry)
                left += 1
            elif not entry.is_urgent:
                self._entries.remove(entry)
                entry.rank += RANK_UNIT * self._work_of([sequence])
                self._entries.add(entry)
        return left

    def discard(self, request: RequestState) -> None:
        """Remove a request, if it is there."""
        entry = self._entry_of.get(request)
        if entry is None:
            return
        # as if served, so that no newcomer gets a lower rank than requests that came before it
        self._mark_served(entry, entry.waiting)
        self._discard(entry)

    def _discard(self, entry: _Entry) -> None:
        del self._entry_of[entry.request]
        self._entries.remove(entry)
        self._by_latest_start.discard(entry)
        self._share.leave(entry.request.request.options.tenant)

    def _mark_served(self, entry: _Entry, sequences: Collection[SequenceState]) -> None:
        self._share.serve(entry.request.request.options.tenant, self._work_of(sequences))
        self.waiting_tokens -= _tokens_of(sequences)

    def _work_of(self, sequences: Collection[SequenceState]) -> int:
        return len(sequences) if self._unit == "sequences" else _tokens_of(sequences)


def _tokens_of(sequences: Iterable[SequenceState]) -> int:
    return sum([sequence.num_tokens for sequence in sequences])
