"""How the requests of a campaign ended, counted by kind and by model.

A request ends in one way:

right      an answer, equal to the known one
answered   an answer to an input without a known one
refused    an error that this kind of request may get
left       the client went away first: a deadline, a cancellation, a disconnect
wrong      another answer, or an error that this kind of request must not get
lost       no end within `TIMEOUT_SECONDS`
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, TypeAlias, get_args

End: TypeAlias = Literal["right", "answered", "refused", "left", "wrong", "lost"]
ENDS: tuple[End, ...] = get_args(End)

# Longer than any answer takes on a busy machine.
TIMEOUT_SECONDS = 60.0
# Problems that are kept as text; all are counted.
_MOST_PROBLEMS = 30

# What no message for a client may contain: frames, absolute paths, names of shared memory, addresses in memory.
_LEAKS = re.compile(
    r"Traceback|\.py\b|_shm_region_|/dev/shm|/proc/|\b0x[0-9a-f]{6,}|(?<![\w.])(?:/[\w.-]+){2,}|numpy"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one request.

    Attributes:
        end: kind of its end.
        model: that it was sent to; empty if it reached none.
        code: gRPC name of the code of an error.
        message: text of an error, or what is wrong.
        rows: number of rows of the request.
        is_ours: whether the backend gave this error, and not the server in front of it.
    """

    end: End
    model: str = ""
    code: str = ""
    message: str = ""
    rows: int = 1
    is_ours: bool = False


@dataclass(slots=True)
class ModelEndings:
    """The requests that one model got, as clients saw their ends.

    Attributes:
        requests, rows: numbers by end.
        errors: requests that were refused, by code; `our_errors` has only the backend's.
    """

    requests: Counter[End] = field(default_factory=Counter)
    rows: Counter[End] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    our_errors: Counter[str] = field(default_factory=Counter)


class Ledger:
    """The ends of all requests of a phase. Any thread may add."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: Counter[str] = Counter()
        self.by_kind: dict[str, Counter[End]] = {}
        self.by_model: dict[str, ModelEndings] = {}
        self.problems: list[str] = []
        self.num_problems = 0

    @property
    def ends(self) -> Counter[End]:
        """All requests, by end."""
        return sum(self.by_kind.values(), Counter[End]())

    @contextmanager
    def sending(self, kind: str) -> Iterator[None]:
        """Count a request as open inside a `with`."""
        with self._lock:
            self._open[kind] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[kind] -= 1

    def add(self, name: str, kind: str, ending: Ending) -> None:
        """Add the end of a request.

        Args:
            name: name of the request, from which it can be sent again.
            kind: kind of the request.
            ending: end of the request.
        """
        with self._lock:
            self.by_kind.setdefault(kind, Counter())[ending.end] += 1
            if ending.model:
                self._add_to_model(ending)
        if ending.end in ("wrong", "lost"):
            self.report(f"{name}: {kind} is {ending.end}: {ending.code} {ending.message}")
        elif leak := find_leak(ending.message):
            self.report(f"{name}: {kind}: the message shows {leak!r}: {ending.message}")

    def report(self, problem: str) -> None:
        """Add a violated invariant."""
        with self._lock:
            self.num_problems += 1
            if len(self.problems) < _MOST_PROBLEMS:
                self.problems.append(problem[:600])

    def check_least(self, least: Mapping[str, Mapping[End, float]]) -> None:
        """Report ends that too few requests of a kind had.

        Args:
            least: least share, by kind and end, of the requests of that kind; one request at least.
        """
        for kind, shares in least.items():
            ends = self.by_kind.get(kind, Counter())
            for end, share in shares.items():
                if ends[end] < max(1.0, share * ends.total()):
                    self.report(
                        f"{ends[end]} of {ends.total()} requests of the kind {kind} are {end}; at least"
                        f" {max(1, math.ceil(share * ends.total()))} must be"
                    )

    def close(self) -> None:
        """Count requests that are still open as lost."""
        for kind, count in self._open.items():
            for _ in range(count):
                self.add("open", kind, Ending("lost", message="no end when the phase ended"))

    def _add_to_model(self, ending: Ending) -> None:
        model = self.by_model.setdefault(ending.model, ModelEndings())
        model.requests[ending.end] += 1
        model.rows[ending.end] += ending.rows
        if ending.end == "refused":
            model.errors[ending.code] += 1
            if ending.is_ours:
                model.our_errors[ending.code] += 1


def find_leak(message: str) -> str | None:
    """Return the part of a message that tells of the server's inside, if any."""
    found = _LEAKS.search(message)
    return found[0] if found else None
