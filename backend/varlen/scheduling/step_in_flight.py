"""A step of generation in flight, as its scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from varlen.scheduling.batch import Chunk
from varlen.scheduling.groups import Group
from varlen.scheduling.sequence import GeneratedSequence

# Steps in flight: one runs, and the next one is ready.
MAX_IN_FLIGHT = 2


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step in flight.

    Attributes:
        number, after: see `StepBatch`.
        chunks: its groups in order, and the chunk of each.
        copies: source by destination of the blocks that it copies.
        ignored: groups that run again, and whose outputs are ignored.
        is_void: whether this is so of all of them, because a step before it has failed.
    """

    number: int
    after: int | None
    chunks: dict[Group, Chunk]
    copies: dict[int, int]
    ignored: set[Group] = field(default_factory=set)
    is_void: bool = False

    @property
    def groups(self) -> list[Group]:
        """The groups whose outputs count."""
        if self.is_void:
            return []
        return [group for group in self.chunks if not (group.is_finished or group in self.ignored)]

    def logit_rows(self) -> dict[GeneratedSequence, int]:
        """Return the first row of the logits that each sequence has."""
        rows: dict[GeneratedSequence, int] = {}
        end = 0
        for chunk in self.chunks.values():
            rows.update(zip(chunk.samples, count(end), strict=False))
            end += chunk.num_logit_rows
        return rows
