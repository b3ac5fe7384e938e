"""All edge cases."""

from __future__ import annotations

from collections.abc import Sequence

from tests.edges import clients, embeddings, generation, limits, scores
from tests.edges.case import Edge

EDGES: Sequence[Edge] = (
    *clients.EDGES,
    *embeddings.EDGES,
    *generation.EDGES,
    *limits.EDGES,
    *scores.EDGES,
)
