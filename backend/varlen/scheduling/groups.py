"""Groups: sequences of generation that are computed as one."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from varlen.scheduling.sequence import GeneratedSequence


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that are computed as one.

    They are the samples of a prompt until it has run, or its beams.

    Attributes:
        order: place among running and waiting sequences: by priority, then by arrival, then by row.
        sequences: those of the answer, at least one.
        has_beams: whether its answer is searched with beams.
        max_branches: most of its samples or beams that run at the same time.
        branches: what is computed: the first sequence, or the beams that are alive.
        source_block_ids: blocks of the keys and values of its source text.
        is_encoded: whether these are stored; also without a source text.
        reserved: blocks that are reserved for it and not used yet.
        has_started: whether it has run before.
    """

    order: tuple[int, int, int]
    sequences: tuple[GeneratedSequence, ...]
    has_beams: bool = field(init=False)
    max_branches: int = field(init=False)
    branches: list[GeneratedSequence] = field(init=False)
    source_block_ids: list[int] = field(default_factory=list)
    is_encoded: bool = field(init=False)
    reserved: int = 0
    has_started: bool = False

    def __post_init__(self) -> None:
        generation = self.first.generation
        self.has_beams = self.first.is_searched
        self.max_branches = generation.num_beams if self.has_beams else len(self.sequences)
        self.branches = [self.first]
        self.is_encoded = not self.first.prompt.num_source_tokens

    @property
    def first(self) -> GeneratedSequence:
        """The first sequence of the answer, whose status is that of the group."""
        return self.sequences[0]

    @property
    def remaining(self) -> int:
        """Number of tokens of each branch to run before one is chosen."""
        return len(self.first.token_ids) - self.first.num_computed

    @property
    def least_tokens(self) -> int:
        """Least number of tokens that it runs in a step."""
        return len(self.branches) + (0 if self.is_encoded else self.first.prompt.num_source_tokens)

    @property
    def is_finished(self) -> bool:
        """Whether it was removed, or has generated its last token."""
        return all(sequence.status == "finished" for sequence in self.sequences)

    def follow(self, parents: Sequence[int], token_ids: Sequence[int]) -> None:
        """Replace the branches: each continues an old one, given by place, by a token."""
        old = [(branch.token_ids, branch.block_ids) for branch in self.branches]
        del self.branches[len(parents) :]
        while len(self.branches) < len(parents):
            self.branches.append(copy(self.first))
        for branch, parent, token_id in zip(self.branches, parents, token_ids, strict=True):
            tokens, table = old[parent]
            branch.token_ids = [*tokens, token_id]
            branch.block_ids = [*table]

    def restart(self) -> None:
        """Make it start again.

        Samples keep their tokens; a search begins anew with its prompt.
        """
        self.is_encoded = not self.first.prompt.num_source_tokens
        first = self.first
        first.num_computed = 0
        if self.has_beams:
            self.branches = [first]
            first.token_ids = first.prompt.token_ids.tolist()
            first.sampler_state = None
