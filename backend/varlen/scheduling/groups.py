"""Groups of sequences that are computed as one, and how they divide a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from varlen.scheduling.beam_blocks import BeamBlocks
from varlen.scheduling.claims import Claim
from varlen.scheduling.sequence import GeneratedSequence


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that are computed as one.

    They are the samples of a prompt until it has run, or its beams.

    Attributes:
        order: place among running and waiting sequences: by rank, then by arrival, then by row.
        sequences: sequences of the answer, at least one.
        claim: tokens that it shares with the other samples of its prompt.
        first: the first sequence of the answer, whose status is the group's.
        max_length: most tokens of a branch, prompt and answer together.
        has_beams: whether its answer is searched with beams.
        max_branches: most of its samples or beams that run at the same time.
        beams: blocks that its beams write, and their places, while it runs.
        source_tokens: length of its source text; 0 without one.
        source_block_ids: blocks of the keys and values of its source text.
        is_encoded: whether these are stored; also without a source text.
        reserved: blocks that are reserved for it and not used yet.
        has_started: whether it has run before.
        skipped: number of steps that did not run it since it last ran or started, while no step in flight ran it.
    """

    order: tuple[int, int, int]
    sequences: tuple[GeneratedSequence, ...]
    claim: Claim
    first: GeneratedSequence = field(init=False)
    max_length: int = field(init=False)
    has_beams: bool = field(init=False)
    max_branches: int = field(init=False)
    beams: BeamBlocks | None = None
    source_tokens: int = field(init=False)
    source_block_ids: list[int] = field(default_factory=list)
    is_encoded: bool = field(init=False)
    reserved: int = 0
    has_started: bool = False
    skipped: int = 0

    def __post_init__(self) -> None:
        self.first = self.sequences[0]
        self.max_length = self.first.num_tokens + self.first.generation.max_tokens
        generation = self.first.generation
        self.has_beams = self.first.is_searched
        self.max_branches = generation.num_beams if self.has_beams else len(self.sequences)
        self.source_tokens = self.first.prompt.num_source_tokens
        self.is_encoded = not self.source_tokens

    @property
    def num_branches(self) -> int:
        """Number of branches in the next step: beams once a search has begun, else one."""
        is_searching = self.has_beams and self.first.length > self.first.num_tokens
        return self.max_branches if is_searching else 1

    @property
    def remaining(self) -> int:
        """Number of tokens of each branch to run before one is chosen."""
        return self.first.length - self.first.num_computed

    @property
    def is_ending(self) -> bool:
        """Whether steps in flight choose its last token."""
        return self.first.length >= self.max_length

    @property
    def can_follow(self) -> bool:
        """Whether it can go on before tokens of steps in flight are known.

        The samples of a prompt part after their first token.
        """
        return self.has_beams or not self.first.num_unknown or len(self.sequences) == 1

    @property
    def is_streaming(self) -> bool:
        """Whether a client waits for the token that its next step chooses.

        The client has read a token of it before. The answer of a search comes in one part.
        """
        first = self.first
        is_stream = first.options.streams and not self.has_beams
        return is_stream and first.length > first.num_tokens and self.remaining == 1

    @property
    def least_tokens(self) -> int:
        """Least number of tokens that it runs in a step."""
        # most groups of a step, asked several times
        if self.is_encoded:
            return self.num_branches if self.has_beams else 1
        return self.num_branches + self.source_tokens

    @property
    def lost_tokens(self) -> int:
        """Tokens that run again if it starts again."""
        first = self.first
        # a search begins anew, so each of its beams generates all its tokens again
        again = self.max_branches * (first.length - first.num_tokens) if self.has_beams else 0
        return first.num_computed + again + (self.source_tokens if self.is_encoded else 0)

    @property
    def is_finished(self) -> bool:
        """Whether it was removed, or has generated its last token."""
        if self.first.status != "finished":
            return False
        return all(sequence.status == "finished" for sequence in self.sequences)

    def restart(self) -> None:
        """Make it start again.

        Samples keep their tokens; a search begins anew with its prompt.
        """
        self.is_encoded = not self.source_tokens
        self.skipped = 0
        first = self.first
        first.num_computed = 0
        if self.has_beams:
            first.num_unknown = 0
            first.sampler_state = None


def divide_step(groups: list[Group], step_tokens: int) -> list[int]:
    """Return the number of tokens of each branch of the groups.

    Each has one, and prompts have the rest in order.

    Args:
        groups: groups of the step, in order.
        step_tokens: number of tokens of the step, unless the groups run more in any case.
    """
    spare = max(0, step_tokens - sum(group.least_tokens for group in groups))
    lengths = []
    for group in groups:
        more = min(group.remaining - 1, spare)
        lengths.append(1 + more)
        spare -= more
    return lengths
