"""When memory is given back: not as soon as it is unused, but once a whole window of batches did without it."""


class HighWater:
    """The largest footprint of each window of so many batches."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._batches = 0
        self._largest = 0

    def add(self, footprint: int) -> int | None:
        """Count a batch in; at the end of a window return how many bytes it reached, which are worth keeping."""
        self._batches += 1
        self._largest = max(self._largest, footprint)
        if self._batches % self._window:
            return None
        reached, self._largest = self._largest, 0
        return reached
