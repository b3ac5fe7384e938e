"""Size of the largest step, which is smaller for some time after memory ran out."""

# After a step that ran out of memory, steps grow again by this part of the largest step each.
_GROWTH = 32


class StepSize:
    """Size of the largest step now.

    Attributes:
        tokens: tokens of the largest step, at least 1.
    """

    def __init__(self, max_tokens: int) -> None:
        """Start with the limit.

        Args:
            max_tokens: tokens of the largest step when no step has run out of memory.
        """
        self._max_tokens = max_tokens
        self.tokens = max_tokens

    @property
    def is_reduced(self) -> bool:
        """Whether a step has run out of memory, and steps are not large again."""
        return self.tokens < self._max_tokens

    def reduce(self, failed_tokens: int) -> None:
        """Halve the size of a step that ran out of memory."""
        self.tokens = max(1, failed_tokens // 2)

    def grow(self) -> None:
        """Grow after a step that ran, up to the limit."""
        growth = max(1, self._max_tokens // _GROWTH)
        self.tokens = min(self.tokens + growth, self._max_tokens)
