"""What waits, in the order in which it is due.

A sequence is due once it has waited as long as any may, or at its deadline if that is sooner. Priority counts as
having waited already. So order of arrival, priority, deadlines and the bound on waiting are one order, and nothing
can be overtaken for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice

from varlen.request import Ticket, Waiting


class WaitingQueue:
    """Sequences by `due`; of those that are due together, the first to come first."""

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()
        self._seconds = 0.0
        # sequences that are here, by request
        self._rows: Counter[Ticket] = Counter()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._queue)

    @property
    def requests(self) -> int:
        """How many requests the sequences belong to."""
        return len(self._rows)

    @property
    def seconds(self) -> float:
        """What all of it is expected to take."""
        return self._seconds if self._queue else 0.0

    def add(self, waiting: Waiting) -> None:
        """Put a sequence in its place: the end, unless it is urgent."""
        self._seconds += waiting.seconds
        self._rows[waiting.ticket] += 1
        place = len(self._queue)
        while place and self._queue[place - 1].due > waiting.due:
            place -= 1
        self._queue.insert(place, waiting)

    def first(self, count: int) -> list[Waiting]:
        """Return those that are due first."""
        return list(islice(self._queue, count))

    def remove(self, batch: list[Waiting]) -> None:
        """Take out sequences that are there; quick if they are near the front."""
        taken = set(batch)
        kept: list[Waiting] = []
        for _ in range(len(batch)):
            while (waiting := self._queue.popleft()) not in taken:
                kept.append(waiting)
            self._seconds -= waiting.seconds
            self._rows[waiting.ticket] -= 1
            if not self._rows[waiting.ticket]:
                del self._rows[waiting.ticket]
        self._queue.extendleft(reversed(kept))

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
        self._rows.clear()
        self._seconds = 0.0
