"""A step of generation in flight, as its scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        chunks: its groups in order, and the chunks of each.
        copies: source by destination of the blocks that it copies.
        ignored: groups that run again, and whose outputs are ignored.
        is_void: whether this is so of all of them, because a step before it has failed.
    """

    number: int
    after: int | None
    chunks: dict[Group, list[Chunk]]
    copies: dict[int, int]
    ignored: set[Group] = field(default_factory=set)
    is_void: bool = False

    @property
    def groups(self) -> list[Group]:
        """The groups whose outputs count."""
        if self.is_void:
            return []
        return [group for group in self.chunks if not (group.is_finished or group in self.ignored)]

    def outputs(self) -> dict[GeneratedSequence, int]:
        """Return the number of the output of each sequence that has one."""
        sequences = (
            sequence
            for chunks in self.chunks.values()
            for chunk in chunks
            for sequence in chunk.samples
        )
        return {sequence: number for number, sequence in enumerate(sequences)}
