"""The waiting and the running groups of a scheduler, in one order.

Waiting groups start in this order; the first that does not fit holds back those behind it. It takes the place of
running groups that are far behind it, which go on later, if that loses few tokens. If it lacks places, short groups
behind it start in places of their own. When a running group needs a block and there is none, the last running groups
give back theirs.

What a step in flight runs is not preempted: the next step has to wait for its end then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from copy import copy

from sortedcontainers import SortedKeyList

from varlen.scheduling.fair_share import RANK_UNIT
from varlen.scheduling.iteration.group_memory import GroupMemory
from varlen.scheduling.iteration.groups import Group
from varlen.scheduling.iteration.step_limits import Places, StepSize


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


class HeldByStepError(Exception):
    """A group would have to be preempted that a step in flight runs."""


class GroupQueues:
    """Waiting and running groups, in one order.

    Only running groups have blocks.

    Attributes:
        running: running groups, in order.
        num_waiting: number of waiting branches.
        memory_preemptions: number of branches that gave back their blocks because there were too few.
        order_preemptions: number of branches that gave back their blocks to a group before them.
    """

    def __init__(self, memory: GroupMemory, places: Places) -> None:
        """Start without a group.

        Args:
            memory: block tables of the running groups.
            places: places of running branches.
        """
        self._memory = memory
        self._places = places
        self._waiting = SortedKeyList(key=lambda group: group.order)
        # the short ones among the waiting groups
        self._short = SortedKeyList(key=lambda group: group.order)
        self.running = SortedKeyList(key=lambda group: group.order)
        self.num_waiting = 0
        self.memory_preemptions = self.order_preemptions = 0

    @property
    def is_empty(self) -> bool:
        """Whether no group waits or runs."""
        return not self.running and not self._waiting

    @property
    def num_running(self) -> int:
        """Number of running branches."""
        return self._places.taken

    def add(self, group: Group) -> None:
        """Add a group to the waiting groups, in order."""
        self._waiting.add(group)
        if self._places.is_short(group):
            self._short.add(group)
        self.num_waiting += group.max_branches

    def start_waiting(self, step: StepSize, held: Set[Group]) -> None:
        """Start waiting groups, up to the first that does not fit.

        If that one lacks places, short groups behind it start too.

        Args:
            step: size of the next step.
            held: groups that steps in flight run.

        Raises:
            HeldByStepError: one would take the place of a held group; those before it have started.
        """
        lacks_places = False
        while self._waiting:
            group = self._waiting[0]
            # what does not fit into the step starts in a later one: a source text runs in one piece
            fits = not self.running or group.least_tokens <= self._free_tokens(step)
            if not fits and step.is_reduced:
                break
            lacks_places = fits and not self._places.have(group)
            has_started = fits and not lacks_places and self._start(group)
            if not has_started and not self._make_room(group, step, held):
                break
        # without this condition, short ones could keep it from blocks for ever
        if self._waiting and lacks_places:
            self._start_short(step)

    def extend_running(self, groups: Iterable[Group], held: Set[Group]) -> bool:
        """Allocate the blocks of tokens to generate; return whether no group was preempted.

        If no block is available, the last groups are preempted, perhaps the one that needs it.

        Args:
            groups: running groups that the next step may run.
            held: groups that steps in flight run.

        Raises:
            HeldByStepError: the last group is held.
        """
        before = self.memory_preemptions
        for group in groups:
            # one before it may have preempted it
            if group.remaining > 1 or not group.is_encoded:
                continue
            while group.first.status == "running" and not self._memory.extend(group):
                last = self.running[-1]
                if last in held:
                    raise HeldByStepError
                self._preempt(last)
                self.memory_preemptions += last.max_branches
        return self.memory_preemptions == before

    def split(self, group: Group) -> list[Group]:
        """Replace a running group by one for each unfinished sample; return the new groups."""
        self._stop(group)
        groups = self._memory.split(group)
        for each in groups:
            self._run(each)
        return groups

    def preempt_all(self) -> None:
        """Let all running groups wait and start again."""
        for group in [*self.running]:
            self._preempt(group)

    def remove_waiting(self, group: Group) -> None:
        """Remove a group that waits."""
        self._waiting.remove(group)
        self._short.discard(group)
        self.num_waiting -= group.max_branches

    def remove_running(self, group: Group) -> None:
        """Remove a group that runs, and release its blocks."""
        self._stop(group)
        self._memory.release(group)

    def _make_room(self, group: Group, step: StepSize, held: Set[Group]) -> bool:
        """Preempt running groups behind a waiting one that needs their place.

        Returns whether the waiting one has a place now.

        A preempted group runs its tokens again. Counted as tokens of the waiting group, they may not move it behind
        the preempted one, so what is lost is at most as much as what is served.
        """
        memory, rank, places = self._memory, group.order[0], copy(self._places)
        blocks, tokens = memory.blocks.available, self._free_tokens(step)
        if blocks + sum(map(memory.held, self.running)) < memory.least_available(group, keep=0):
            return False
        last_first, behind = reversed(self.running), list[Group]()
        while (
            not places.have(group)
            or blocks < memory.least_available(group, keep=places.taken)
            # what is larger than a step runs when nothing else does
            or (tokens < group.least_tokens and len(behind) < len(self.running))
        ):
            other = next(last_first, None)
            if other is None:
                return False
            rank += RANK_UNIT * other.lost_tokens
            if rank >= other.order[0]:
                return False
            behind.append(other)
            places.leave(other)
            blocks += memory.freed(other)
            tokens += other.least_tokens
        if not held.isdisjoint(behind):
            raise HeldByStepError
        for other in behind:
            self.order_preemptions += other.max_branches
            self._preempt(other)
        return bool(behind)

    def _start_short(self, step: StepSize) -> None:
        """Start short groups in the places for them."""
        while self._short and self._places.have_short:
            group = self._short[0]
            if group.least_tokens > self._free_tokens(step) or not self._start(group):
                break

    def _start(self, group: Group) -> bool:
        """Start a waiting group that has a place; return False if blocks are few."""
        # each running sequence may need one soon; without them the new one would be preempted at once
        if not self._memory.start(group, keep=self.num_running):
            return False
        self.remove_waiting(group)
        self._run(group)
        for sequence in group.sequences:
            sequence.status = "running"
        return True

    def _free_tokens(self, step: StepSize) -> int:
        """Return how many tokens of a step no running group needs.

        One step has enough tokens for all of them, though the steps of a pipeline divide them.
        """
        used: int = sum(group.least_tokens for group in self.running)
        return step.tokens - used

    def _preempt(self, group: Group) -> None:
        """Release the blocks of a group, and let it wait in its old place."""
        self.remove_running(group)
        group.restart()
        for sequence in group.sequences:
            sequence.status = "waiting"
        self.add(group)

    def _run(self, group: Group) -> None:
        self.running.add(group)
        self._places.take(group)

    def _stop(self, group: Group) -> None:
        self.running.remove(group)
        self._places.leave(group)
