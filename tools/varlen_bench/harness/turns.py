"""Systems that take turns: a process for each, measured one after another in every round.

A drift of the machine affects all systems of a round. A system that fails keeps its reason; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from varlen_bench.harness.command import Progress
from varlen_bench.harness.worker import WorkerError

# Threads of the last system stop spinning in this time.
_PAUSE_SECONDS = 0.2


class NamedSystem(Protocol):
    """A system of a benchmark."""

    @property
    def name(self) -> str:
        """Its name in tables."""


class Measured(Protocol):
    """What is known of a system: figures by round, or why it did not run."""

    note: str
    rounds: list[dict[str, float]]

    @property
    def system(self) -> NamedSystem:
        """The system."""


_Measured = TypeVar("_Measured", bound=Measured)


def measure_in_turns(
    results: Sequence[_Measured],
    measure: Callable[[_Measured], dict[str, float]],
    *,
    rounds: int,
    title: str,
    report: Progress,
) -> None:
    """Append the figures of each round to the results of systems that run."""
    for number in range(rounds):
        for result in results:
            if not result.note:
                report(f"{title}: round {number + 1} of {rounds}, {result.system.name}")
                time.sleep(_PAUSE_SECONDS)
                with noted_failure(result, report):
                    result.rounds.append(measure(result))


@contextmanager
def noted_failure(result: Measured, report: Progress) -> Iterator[None]:
    """Turn an error into a failed result with its reason."""
    try:
        yield
    except (WorkerError, RuntimeError, ValueError) as error:
        result.note = f"did not run: {error}".replace(str(Path.home()), "~")
        result.rounds.clear()
        report(f"{result.system.name} {result.note}")
