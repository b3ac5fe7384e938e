"""The place of a process among those that hold one model together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a tensor-parallel group; each one holds a part of every layer.

    Attributes:
        number: its number; rank 0 leads: it has the logits.
    """

    number: int = 0
    size: int = 1

    def bounds(self, total: int) -> tuple[int, int]:
        """Return the bounds of its part of `total` rows or columns.

        Parts are equal, except that the last ones may be shorter or empty.
        """
        part = -(-total // self.size)
        return min(self.number * part, total), min((self.number + 1) * part, total)

    def share(self, units: int) -> tuple[int, int]:
        """Return the bounds of its part of some heads.

        Parts are equal. Where there are fewer heads than ranks, several ranks hold the same one.
        """
        first = self.number * units // self.size
        return first, first + max(1, units // self.size)


ALONE = Rank()
# Name of the state that is the memory in which ranks meet.
RANKS = "ranks"
