"""Stand-in for CUDA graphs without a GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor


class RepeatedWork:
    """Repeats captured work at once, and counts captures and replays."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def capture(self, work: Callable[[], object], *, has_run: bool = False) -> Callable[[], object]:
        """Run the work; return a function that runs it again."""
        if not has_run:
            work()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy."""
        into.copy_(source)

    def record(self) -> Callable[[], object]:
        """Return a function that has nothing to wait for."""
        return lambda: None

    def used_bytes(self) -> int:
        """Return a megabyte per graph."""
        return self.captured * 1_000_000

    def close(self) -> None:
        """Do nothing."""
