"""Steps that start before the one before them has ended.

Such a step takes tokens that the one before it chooses, and reads the keys and values that it stores. If that one
fails, this one must not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from varlen.execution.executor import SkippedStepError


class StepOrder:
    """Which step failed last. Steps run in their order."""

    def __init__(self) -> None:
        self._failed: int | None = None

    def is_skipped(self, after: int | None) -> bool:
        """Return whether a step must not run that needs the step of this number."""
        return after is not None and after == self._failed

    @contextmanager
    def running(self, number: int, after: int | None) -> Iterator[None]:
        """Return the context in which a step runs.

        Args:
            number, after: see `StepBatch`.

        Raises:
            SkippedStepError: it must not run.
        """
        try:
            if self.is_skipped(after):
                raise SkippedStepError
            yield
        except BaseException:
            self._failed = number
            raise
