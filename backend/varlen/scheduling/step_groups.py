"""Choice of the running groups that the next step runs.

Without a pipeline, every running group runs in every step. In a pipeline of stages, the steps in flight run different
groups. Each step takes its share of the running groups from the groups that are not in flight, in order, so a group
runs once in `stages` steps. The last group may exceed the share, since the beams of a search run in one step.

If steps end before the pipeline is full, the first groups could take the share of every step. So a group goes first
once `stages` steps have skipped it. The next `stages` steps have shares for all groups that go first, since a group
that runs is not among these again until then. So fewer than `2 * stages` steps in a row skip a group, as long as a step
has enough tokens for all running groups, which is so unless a step has run out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from varlen.scheduling.groups import Group


class StepGroups:
    """Chooses the groups of each step."""

    def __init__(self, stages: int) -> None:
        """Start without a step.

        Args:
            stages: stages of the model's pipeline; 1 is no pipeline.
        """
        self._stages = stages

    def candidates(self, running: Iterable[Group], busy: Set[Group]) -> list[Group]:
        """Return the groups that the next step may run, in its order.

        Args:
            running: running groups, in order.
            busy: groups that the next step cannot run, because steps in flight do.
        """
        groups = [group for group in running if not (group.is_ending or group in busy)]
        if self._stages > 1:
            groups.sort(key=lambda group: group.skipped < self._stages)
        return groups

    def take(self, running: Iterable[Group], busy: Set[Group], step_tokens: int) -> list[Group]:
        """Return the groups of the next step; it skips the other candidates.

        Args:
            running, busy: see `candidates`.
            step_tokens: largest step, in tokens.
        """
        candidates = self.candidates(running, busy)
        groups = first_groups(candidates, step_tokens, share=self._share(running))
        for group in groups:
            group.skipped = 0
        for group in candidates[len(groups) :]:
            group.skipped += 1
        return groups

    def _share(self, running: Iterable[Group]) -> float:
        """Return the share of one step in the least tokens of all running groups."""
        if self._stages == 1:
            return math.inf
        # groups that end with steps in flight count too; otherwise steps of many short answers would get ever smaller
        return math.ceil(sum(group.least_tokens for group in running) / self._stages)


def first_groups(
    groups: Iterable[Group], step_tokens: int, *, share: float = math.inf
) -> list[Group]:
    """Return the first groups that fit into a step; the first one always fits.

    Args:
        groups: groups that may run, in order.
        step_tokens: largest step, in tokens.
        share: number of tokens; the last group may exceed it.
    """
    first: list[Group] = []
    tokens = 0
    for group in groups:
        if tokens >= share:
            break
        tokens += group.least_tokens
        if first and tokens > step_tokens:
            break
        first.append(group)
    return first
