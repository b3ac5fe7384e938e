"""Steps of generation in flight, as their scheduler sees them.

Without a pipeline, one step runs and the next one is ready: it runs the tokens that the step before it chooses. In a
pipeline of stages, as many steps are in flight as there are stages. They run different sequences, so none needs the
result of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import count

from varlen.scheduling.batch import Chunk, Failure
from varlen.scheduling.iteration.groups import Group
from varlen.scheduling.sequence import GeneratedSequence

# Steps in flight without a pipeline: one runs, and the next one is ready.
MAX_IN_FLIGHT = 2


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step in flight.

    Attributes:
        number, after: see `Batch`.
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

    @property
    def can_be_followed(self) -> bool:
        """Whether the next step can be scheduled before the tokens of this one are known."""
        return all(group.can_follow or group.is_ending for group in self.groups)

    def logit_rows(self) -> dict[GeneratedSequence, int]:
        """Return the first row of the logits that each sequence has."""
        rows: dict[GeneratedSequence, int] = {}
        end = 0
        for chunk in self.chunks.values():
            rows.update(zip(chunk.samples, count(end), strict=False))
            end += chunk.num_logit_rows
        return rows


class StepsInFlight:
    """The steps in flight, which end in the order of their start.

    Attributes:
        steps: the steps, in order.
    """

    def __init__(self, stages: int) -> None:
        """Start without a step.

        Args:
            stages: stages of the model's pipeline; 1 is no pipeline.
        """
        self._is_pipeline = stages > 1
        self._max_steps = stages if self._is_pipeline else MAX_IN_FLIGHT
        self._numbers = count()
        self.steps: deque[StepInFlight] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the next step has to wait for the end of one."""
        return len(self.steps) == self._max_steps

    @property
    def groups(self) -> Set[Group]:
        """The groups whose outputs count."""
        return {group for step in self.steps for group in step.groups}

    @property
    def followed(self) -> StepInFlight | None:
        """The step whose tokens the next one runs; None in a pipeline."""
        if self._is_pipeline or not self.steps or self.steps[-1].is_void:
            return None
        return self.steps[-1]

    def start(self, chunks: dict[Group, Chunk], copies: dict[int, int]) -> StepInFlight:
        """Add the next step and return it."""
        before = self.followed
        after = None if before is None else before.number
        step = StepInFlight(next(self._numbers), after, chunks, copies)
        self.steps.append(step)
        return step

    def end(self, number: int) -> StepInFlight | None:
        """Remove and return the first step; None if this number was removed before."""
        if not self.steps or self.steps[0].number > number:
            return None
        return self.steps.popleft()

    def lost_after(self, failure: Failure) -> list[StepInFlight]:
        """Return the steps whose results do not count after the first one failed."""
        return [step for step in self.steps if failure == "worker" or step.after is not None]
