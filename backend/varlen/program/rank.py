"""A process among those that hold a model together, and heads that they divide.

Nothing here imports torch.
"""

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


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of an attention layer, side by side in each row.

    Attributes:
        queries: number of query heads; a multiple of `keys`. 0 for rows of only keys and values.
        keys: number of key heads, and of value heads.
    """

    queries: int
    keys: int
    dim: int

    @property
    def counts(self) -> dict[str, int]:
        """The attributes of ops on heads."""
        return {"num_heads": self.queries, "num_kv_heads": self.keys}

    @property
    def width(self) -> int:
        """Features of the queries of one token."""
        return self.queries * self.dim
