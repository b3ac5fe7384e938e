"""Limits of steps and sequences, and the refusal of requests that can never run."""

from __future__ import annotations

from dataclasses import dataclass

from varlen.errors import RequestError
from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt
from varlen.scheduling.iteration.group_memory import GroupMemory
from varlen.scheduling.iteration.groups import Group


@dataclass(slots=True)
class Places:
    """How many sequences may run, and how many do.

    Attributes:
        count: places of all sequences.
        short_count: places beside them for short ones. Short ones beyond these take places of all.
        short_tokens: tokens of the longest short one, prompt and generated tokens together.
        others, short: running branches of other groups and of short ones.
    """

    count: int
    short_count: int
    short_tokens: int
    others: int = 0
    short: int = 0

    @property
    def taken(self) -> int:
        """All running branches."""
        return self.others + self.short

    def is_short(self, group: Group) -> bool:
        """Return whether a group may take a place for short ones."""
        first, options = group.first, group.first.generation
        # one of many samples is a part of a large request
        if max(options.n, options.num_beams) > 1:
            return False
        return first.num_tokens + group.source_tokens + options.max_tokens <= self.short_tokens

    def have(self, group: Group) -> bool:
        """Return whether there is a place for each branch of a group."""
        others, short = self.others, self.short
        if self.is_short(group):
            short += group.max_branches
        else:
            others += group.max_branches
        return others + max(0, short - self.short_count) <= self.count

    @property
    def have_short(self) -> bool:
        """Whether one of the places for short ones is free."""
        return self.short < self.short_count

    def take(self, group: Group) -> None:
        """Count a group that starts."""
        self._add(group, group.max_branches)

    def leave(self, group: Group) -> None:
        """Count a group that stops."""
        self._add(group, -group.max_branches)

    def _add(self, group: Group, branches: int) -> None:
        if self.is_short(group):
            self.short += branches
        else:
            self.others += branches


# After a step that ran out of memory, steps grow again by this part of the largest step each.
_GROWTH = 32


class StepSize:
    """Size of the largest step now.

    Attributes:
        tokens: tokens of the largest step, at least 1.
    """

    def __init__(self, max_tokens: int) -> None:
        """Start with the limit.

        Args:
            max_tokens: tokens of the largest step when no step has run out of memory.
        """
        self._max_tokens = max_tokens
        self.tokens = max_tokens

    @property
    def is_reduced(self) -> bool:
        """Whether a step has run out of memory, and steps are not large again."""
        return self.tokens < self._max_tokens

    def reduce(self, failed_tokens: int) -> None:
        """Halve the size of a step that ran out of memory."""
        self.tokens = max(1, failed_tokens // 2)

    def grow(self) -> None:
        """Grow after a step that ran, up to the limit."""
        growth = max(1, self._max_tokens // _GROWTH)
        self.tokens = min(self.tokens + growth, self._max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step and of a sequence.

    Attributes:
        max_step_tokens: largest step, in tokens.
        inter_token_latency_seconds: target of the seconds of a step while sequences are streamed; 0 is no target.
        max_running_sequences: largest number of sequences that run at the same time, without `short_places`.
        max_sequence_tokens: longest sequence, prompt and generated tokens together.
        short_places: places beside them for short sequences.
        short_tokens: tokens of the longest short one, prompt and generated tokens together.
        stages: stages of the model's pipeline; as many steps of different sequences are in flight. 1 is no pipeline.
    """

    max_step_tokens: int
    inter_token_latency_seconds: float
    max_running_sequences: int
    max_sequence_tokens: int
    short_places: int
    short_tokens: int
    stages: int = 1

    @property
    def step_latency_seconds(self) -> float:
        """Target of the seconds between the ends of two steps.

        A sequence runs once in `stages` steps.
        """
        return self.inter_token_latency_seconds / self.stages

    def new_places(self) -> Places:
        """Return the places of running sequences, all free."""
        # each running sequence has a token in every step; in a pipeline, one step may be the only one in flight
        places = min(self.max_running_sequences, self.max_step_tokens)
        short_places = min(self.short_places, self.max_step_tokens - places)
        return Places(places, short_places, self.short_tokens)


def check_fits(
    row: int, prompt: Prompt, options: GenerationOptions, limits: StepLimits, memory: GroupMemory
) -> None:
    """Check that a prompt can run when nothing else does.

    Raises:
        RequestError: it is too long, has too many samples or beams, or needs too many KV blocks.
    """
    length = len(prompt.token_ids)
    if length + options.max_tokens > limits.max_sequence_tokens:
        raise RequestError(
            f"row {row}: the prompt has {length} tokens and max_tokens is {options.max_tokens};"
            f" this model takes at most {limits.max_sequence_tokens} in all"
        )
    name, branches = ("num_beams", options.num_beams) if options.num_beams > 1 else ("n", options.n)
    most = min(limits.max_running_sequences, limits.max_step_tokens)
    if branches > most:
        raise RequestError(
            f"{name} is {branches}; this model generates at most {most} sequences at a time"
        )
    # without reservations, samples that do not fit together run one after another; beams cannot
    shares = not memory.reserves and options.num_beams == 1
    needed = memory.need(prompt, options.max_tokens, 1 if shares else branches)
    blocks = memory.blocks
    if needed > blocks.num_blocks:
        raise RequestError(
            f"row {row}: {prompt.num_tokens} tokens and {branches} times max_tokens of {options.max_tokens} need"
            f" {needed} KV blocks of {blocks.block_size} tokens; this model has {blocks.num_blocks} (kv_bytes)"
        )
