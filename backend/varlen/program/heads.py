"""The heads of attention layers, and their tables of distances; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of an attention layer, side by side in each row.

    Attributes:
        queries: number of query heads; a multiple of `keys`. 0 for rows of keys and values alone.
        keys: number of key heads, and of value heads.
        dim: features of a head.
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


@dataclass(frozen=True, slots=True)
class DistanceTables:
    """Keys and queries of distances, whose products `attention_varlen` adds to those of tokens.

    Attributes:
        rows: `[2 * reach + 1]` int32, the row of each distance in the tables; None without tables.
        keys, queries: `[rows, heads.width]`, one of them at least.
    """

    rows: Tensor | None
    keys: Tensor | None
    queries: Tensor | None
