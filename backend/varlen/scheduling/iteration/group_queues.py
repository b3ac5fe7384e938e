"""The waiting and the running groups, and the ones that the next step runs.

Waiting groups start in this order; the first that does not fit holds back those behind it. It preempts running groups
that are far behind it, if that loses few tokens. If it lacks slots, short groups behind it start in slots of their own.
When a running group needs a block and there is none, the last running groups give back theirs. A group that a step in
flight runs is not preempted: the next step has to wait for the end of that step.

The steps of a pipeline divide the running groups; one that was skipped in as many steps as there are stages goes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from copy import copy
from dataclasses import dataclass

from sortedcontainers import SortedKeyList

from varlen.request.request import new_tuple
from varlen.scheduling.admission import RANK_UNIT
from varlen.scheduling.iteration.group_memory import GroupMemory
from varlen.scheduling.iteration.groups import Group, Part
from varlen.scheduling.iteration.step_size import StepLimits, StepSize


@dataclass(slots=True)
class RunningSlots:
    """How many sequences may run, and how many do.

    Attributes:
        short_count: slots beside them for short ones. Short ones beyond these take slots of all.
        short_tokens: tokens of the longest short one, prompt and generated tokens together.
        others, short: running branches of other groups and of short ones.
    """

    count: int
    short_count: int
    short_tokens: int
    others: int = 0
    short: int = 0

    @classmethod
    def of(cls, limits: StepLimits) -> RunningSlots:
        """Return the slots of running sequences, all free."""
        # each running sequence has a token in every step; in a pipeline, one step may be the only one in flight
        count = min(limits.max_running_sequences, limits.max_step_tokens)
        short_count = min(limits.short_slots, limits.max_step_tokens - count)
        return cls(count, short_count, limits.short_tokens)

    @property
    def taken(self) -> int:
        return self.others + self.short

    def is_short(self, group: Group) -> bool:
        first, options = group.first, group.first.generation
        # one of many samples is a part of a large request
        if max(options.n, options.num_beams) > 1:
            return False
        return first.num_tokens + group.source_tokens + options.max_tokens <= self.short_tokens

    def have(self, group: Group) -> bool:
        others, short = self.others, self.short
        if group.is_short:
            short += group.max_branches
        else:
            others += group.max_branches
        return others + max(0, short - self.short_count) <= self.count

    def leave(self, group: Group) -> None:
        self.take(group, -1)

    def take(self, group: Group, times: int = 1) -> None:
        if group.is_short:
            self.short += times * group.max_branches
        else:
            self.others += times * group.max_branches


def parts_of(running: Iterable[Group], busy: Set[Group], stages: int = 1) -> list[Part]:
    """Return the groups that the next step may run, in its order.

    Args:
        running: running groups, in order.
        busy: groups that the next step cannot run, because steps in flight do.
        stages: stages of the model's pipeline; 1 is no pipeline. In a pipeline, groups that were skipped in as many
            steps go first.
    """
    parts: list[Part] = []
    for group in running:
        first = group.first
        length = len(first.token_ids) + first.num_unknown
        # steps in flight may choose its last token
        if length < group.max_length and not (busy and group in busy):
            least_tokens = 1 if group.is_plain else group.least_tokens
            parts.append(new_tuple(Part, (group, length - first.num_computed, least_tokens)))
    if stages > 1:
        parts.sort(key=lambda part: part.group.skipped < stages)
    return parts


def first_parts(parts: list[Part], step_tokens: int, *, share: float = math.inf) -> list[Part]:
    """Return the first parts that fit into a step; the first one always fits.

    Args:
        share: number of tokens; the last group may exceed it.
    """
    if share == math.inf and sum([part.least_tokens for part in parts]) <= step_tokens:
        return parts
    tokens = 0
    for count, part in enumerate(parts):
        if tokens >= share:
            return parts[:count]
        tokens += part.least_tokens
        if count and tokens > step_tokens:
            return parts[:count]
    return parts


def take_share(
    parts: list[Part], running: Iterable[Group], step_tokens: int, stages: int
) -> list[Part]:
    """Return the parts of a pipeline's next step, and count it for the others."""
    # groups that end with steps in flight count too; otherwise steps of many short answers would get ever smaller
    share = math.ceil(sum(group.least_tokens for group in running) / stages)
    taken = first_parts(parts, step_tokens, share=share)
    for part in taken:
        part.group.skipped = 0
    for part in parts[len(taken) :]:
        part.group.skipped += 1
    return taken


class HeldByStepError(Exception):
    """A group would have to be preempted that a step in flight runs."""


class GroupQueues:
    """Waiting and running groups, in one order.

    Only running groups have blocks.

    Attributes:
        memory_preemptions: number of branches that gave back their blocks because there were too few.
        order_preemptions: number of branches that gave back their blocks to a group before them.
    """

    def __init__(self, memory: GroupMemory, slots: RunningSlots, stages: int) -> None:
        self._memory = memory
        self._slots = slots
        self._stages = stages
        # whether a group has started or stopped running since the last look at the running ones
        self._has_changed = False
        self._waiting = SortedKeyList(key=lambda group: group.order)
        # the short ones among the waiting groups
        self._short = SortedKeyList(key=lambda group: group.order)
        self.running = SortedKeyList(key=lambda group: group.order)
        self.num_waiting = 0
        self.memory_preemptions = self.order_preemptions = 0

    @property
    def is_empty(self) -> bool:
        return not self.running and not self._waiting

    @property
    def num_running(self) -> int:
        return self._slots.taken

    @property
    def num_free(self) -> int:
        """Number of rows of a step that running sequences leave free."""
        slots = self._slots
        return slots.count + slots.short_count - slots.taken

    def add(self, group: Group) -> None:
        self._waiting.add(group)
        group.is_short = self._slots.is_short(group)
        if group.is_short:
            self._short.add(group)
        self.num_waiting += group.max_branches

    def next_parts(self, step: StepSize, held: Set[Group], busy: Set[Group]) -> list[Part]:
        """Return the groups of the next step, which have blocks for a token to generate.

        Args:
            busy: the ones of them that the next step cannot run.

        Raises:
            HeldByStepError: a held group would have to be preempted.
        """
        self._has_changed = False
        candidates = parts_of(self.running, busy, self._stages)
        parts = first_parts(candidates, step.tokens)
        self._extend(parts, held)
        if self._waiting and not self._has_changed:
            self._start_waiting(step, held)
        if self._has_changed:
            candidates = parts_of(self.running, busy, self._stages)
            parts = first_parts(candidates, step.tokens)
        if self._stages == 1:
            return parts
        return take_share(candidates, self.running, step.tokens, self._stages)

    def _start_waiting(self, step: StepSize, held: Set[Group]) -> None:
        """Start waiting groups, up to the first that does not fit.

        If that one lacks slots, short groups behind it start too.

        Raises:
            HeldByStepError: one would preempt a held group; the waiting groups before it have started.
        """
        lacks_slots, free = False, self._free_tokens(step)
        while self._waiting:
            group = self._waiting[0]
            # what does not fit into the step starts in a later one: a source text runs in one piece
            fits = not self.running or group.least_tokens <= free
            if not fits and step.is_reduced:
                break
            lacks_slots = fits and not self._slots.have(group)
            has_started = fits and not lacks_slots and self._start(group)
            if not has_started and not self._make_room(group, step, held):
                break
            free = free - group.least_tokens if has_started else self._free_tokens(step)
        # without this condition, short ones could keep it from blocks for ever
        if self._waiting and lacks_slots:
            self._start_short(step)

    def _extend(self, parts: Iterable[Part], held: Set[Group]) -> None:
        """Allocate the blocks of tokens to generate.

        If no block is available, the last groups are preempted, perhaps the one that needs it.

        Args:
            parts: running groups that the next step may run.

        Raises:
            HeldByStepError: the last group is held.
        """
        for group in self._memory.lacking(parts):
            # one before it may have preempted it
            while group.first.status == "running" and not self._memory.extend(group):
                last = self.running[-1]
                if last in held:
                    raise HeldByStepError
                self._preempt(last)
                self.memory_preemptions += last.max_branches

    def split(self, group: Group) -> list[Group]:
        """Replace a running group by one for each unfinished sample; return the new groups."""
        self._stop(group)
        groups = self._memory.split(group)
        for each in groups:
            self._run(each)
        return groups

    def preempt_all(self) -> None:
        for group in [*self.running]:
            self._preempt(group)

    def remove_waiting(self, group: Group) -> None:
        self._waiting.remove(group)
        if group.is_short:
            self._short.remove(group)
        self.num_waiting -= group.max_branches

    def remove_running(self, group: Group) -> None:
        self._stop(group)
        self._memory.release(group)

    def _make_room(self, group: Group, step: StepSize, held: Set[Group]) -> bool:
        """Preempt running groups behind a waiting one that needs their slots.

        Returns whether the waiting one has a slot now.

        A preempted group runs its tokens again. Counted as tokens of the waiting group, they may not move it behind
        the preempted one, so what is lost is at most as much as what is served.
        """
        memory, rank, slots = self._memory, group.order[0], copy(self._slots)
        blocks, tokens = memory.blocks.available, self._free_tokens(step)
        if blocks + sum(map(memory.held, self.running)) < memory.least_available(group, keep=0):
            return False
        last_first, behind = reversed(self.running), list[Group]()
        while (
            not slots.have(group)
            or blocks < memory.least_available(group, keep=slots.taken)
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
            slots.leave(other)
            blocks += memory.freed(other)
            tokens += other.least_tokens
        if not held.isdisjoint(behind):
            raise HeldByStepError
        for other in behind:
            self.order_preemptions += other.max_branches
            self._preempt(other)
        return bool(behind)

    def _start_short(self, step: StepSize) -> None:
        while self._short and self._slots.short < self._slots.short_count:
            group = self._short[0]
            if group.least_tokens > self._free_tokens(step) or not self._start(group):
                break

    def _start(self, group: Group) -> bool:
        """Start a waiting group that has a slot; return False if blocks are few."""
        # each running sequence may need one soon; without them the new one would be preempted at once
        if not self._memory.allocate_first(group, keep=self.num_running):
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
        self.remove_running(group)
        group.restart()
        for sequence in group.sequences:
            sequence.status = "waiting"
        self.add(group)

    def _run(self, group: Group) -> None:
        self._has_changed = True
        self.running.add(group)
        self._slots.take(group)

    def _stop(self, group: Group) -> None:
        self._has_changed = True
        self.running.remove(group)
        self._slots.leave(group)
