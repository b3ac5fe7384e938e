"""The heads of attention layers, in a file that imports no torch."""

from dataclasses import dataclass


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
