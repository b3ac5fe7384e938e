"""Groups of sequences that are computed as one, and how they divide a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from varlen.scheduling.admission import Claim
from varlen.scheduling.batch import GeneratedSequence
from varlen.scheduling.iteration.speculation import Drafter, ModelDrafter

# Instead of a block that was given back, of the prompt's last one, and of one that only the device knows.
_GIVEN_BACK, _OF_PROMPT, _UNKNOWN = -1, -2, 0


@dataclass(slots=True, eq=False)
class BeamBlocks:
    """Blocks of the beams of a search.

    A column is an index of block tables: the blocks of one column hold the same positions.

    Attributes:
        slots: slot of each beam in the state that the device keeps of all beams that run.
        num_tokens: length of the prompt.
        blocks: blocks of one column after another, one for each beam. The first beam writes to the last block of the
            prompt, so a column that begins with the prompt has one less.
    """

    slots: tuple[int, ...]
    num_tokens: int
    block_size: int
    blocks: list[int] = field(default_factory=list)
    # blocks of each beam when the last column began, and parents of the beams since then
    _tables: list[list[int]] = field(default_factory=list)
    _parents: list[tuple[int, ...]] = field(default_factory=list)
    _num_followed: int = 0

    @property
    def num_beams(self) -> int:
        return len(self.slots)

    def column(self, position: int) -> slice:
        full, rest = divmod(self.num_tokens, self.block_size)
        begin = self.num_beams * (position // self.block_size - full) - (rest > 0)
        return slice(max(0, begin), begin + self.num_beams)

    def held(self) -> list[int]:
        """Return the blocks that were not given back."""
        return [block for block in self.blocks if block != _GIVEN_BACK]

    def tables(self, position: int, prompt_blocks: Sequence[int]) -> array[int]:
        """Return the block tables of beams up to a position, as a step has them.

        The first tables are the prompt's, with blocks that the beams write. Later ones depend on what the
        beams continue; a block that they begin is theirs by number.

        Args:
            position: position of the token that runs.
        """
        column, offset = divmod(position, self.block_size)
        is_first = position <= self.num_tokens
        known = prompt_blocks[:column] if is_first else [_UNKNOWN] * column
        last = self.blocks[self.column(position)]
        if is_first and self.num_tokens % self.block_size:
            last = [prompt_blocks[column], *last]
        elif offset:
            last = [_UNKNOWN] * self.num_beams
        return array("i", [block for own in last for block in (*known, own)])

    def follow(self, parents: Sequence[int]) -> list[int]:
        """Note which beams the next ones continue; return blocks that none reads any more.

        Args:
            parents: the beam of the last step that each beam continues; fewer if some are not alive.
        """
        # of those that are not alive, any
        self._parents.append((*parents, *[0] * (self.num_beams - len(parents))))
        position = self.num_tokens + self._num_followed
        self._num_followed += 1
        if position % self.block_size:
            return []
        for at, each in enumerate(self._parents, start=position - len(self._parents) + 1):
            self._continue(each, at)
        self._parents.clear()
        read = {block for table in self._tables for block in table} | {_GIVEN_BACK}
        full = range(self.column(position).start)
        unread = [index for index in full if self.blocks[index] not in read]
        given_back = [self.blocks[index] for index in unread]
        for index in unread:
            self.blocks[index] = _GIVEN_BACK
        return given_back

    def _continue(self, parents: Sequence[int], position: int) -> None:
        """Let each beam have the table of the one that it continues.

        The rule is the one of `varlen_kernels.reference.follow_beams`. A table gets the block of a column once the
        first position of it has run.
        """
        offset = position % self.block_size
        if position == self.num_tokens:
            own = [_OF_PROMPT, *self.blocks[self.column(position)]] if offset else []
            self._tables = [[block] for block in own] or [[] for _ in parents]
            return
        before = self._tables
        if (position - 1) % self.block_size == 0:
            own = self.blocks[self.column(position - 1)]
            before = [[*table, block] for table, block in zip(before, own, strict=True)]
        self._tables = [[*before[parent]] for parent in parents]
        if not offset:
            return
        unused = iter(sorted(set(range(self.num_beams)).difference(parents)))
        for beam, parent in enumerate(parents):
            if parent in parents[:beam]:
                self._tables[beam][-1] = before[next(unused)][-1]


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that are computed as one.

    They are the samples of a prompt until it has run, or its beams.

    Attributes:
        order: sort key among running and waiting groups: by rank, then by arrival, then by row.
        sequences: sequences of the answer, at least one.
        claim: tokens that it shares with the other samples of its prompt.
        first: the first sequence of the answer, whose status is the group's.
        max_length: most tokens of a branch, prompt and answer together.
        has_beams: whether its answer is searched with beams.
        is_plain: whether it is one sampled sequence without a source text.
        may_draft: whether its tokens may be drafted.
        max_branches: most of its samples or beams that run at the same time.
        streams: whether its client reads the answer token by token. The answer of a search comes in one part.
        beams: blocks that its beams write, and their slots, while it runs.
        source_tokens: length of its source text; 0 without one.
        source_block_ids: blocks of the keys and values of its source text.
        is_encoded: whether these are stored; also without a source text.
        reserved: blocks that are reserved for it and not used yet.
        has_started: whether it has run before.
        is_short: see `RunningSlots`.
        skipped: number of steps that did not run it since it last ran or started, while no step in flight ran it.
        drafter: drafts its tokens, if they were drafted before.
    """

    order: tuple[int, int, int]
    sequences: tuple[GeneratedSequence, ...]
    claim: Claim
    first: GeneratedSequence = field(init=False)
    max_length: int = field(init=False)
    has_beams: bool = field(init=False)
    is_plain: bool = field(init=False)
    may_draft: bool = field(init=False)
    max_branches: int = field(init=False)
    streams: bool = field(init=False)
    beams: BeamBlocks | None = None
    source_tokens: int = field(init=False)
    source_block_ids: list[int] = field(default_factory=list)
    is_encoded: bool = field(init=False)
    reserved: int = 0
    has_started: bool = False
    is_short: bool = False
    skipped: int = 0
    drafter: Drafter | ModelDrafter | None = None

    def __post_init__(self) -> None:
        self.first = self.sequences[0]
        self.max_length = self.first.num_tokens + self.first.generation.max_tokens
        generation = self.first.generation
        self.has_beams = self.first.is_searched
        self.max_branches = generation.num_beams if self.has_beams else len(self.sequences)
        self.streams = self.first.options.streams and not self.has_beams
        self.source_tokens = self.first.prompt.num_source_tokens
        self.is_encoded = not self.source_tokens
        self.is_plain = self.is_encoded and not self.has_beams and len(self.sequences) == 1
        # words and grammars need the tokens of rows that are not chosen yet
        self.may_draft = self.is_plain and not (generation.bad_words or generation.grammar)

    @property
    def num_branches(self) -> int:
        """Number of branches in the next step: beams once a search has begun, else one."""
        is_searching = self.has_beams and self.first.length > self.first.num_tokens
        return self.max_branches if is_searching else 1

    @property
    def is_ending(self) -> bool:
        """Whether steps in flight choose its last token."""
        return self.first.length >= self.max_length

    @property
    def can_follow(self) -> bool:
        """Whether it can go on before tokens of steps in flight are known.

        The samples of a prompt part after their first token.
        """
        return len(self.sequences) == 1 or self.has_beams or not self.first.num_unknown

    @property
    def least_tokens(self) -> int:
        return self.num_branches + (0 if self.is_encoded else self.source_tokens)

    @property
    def lost_tokens(self) -> int:
        """Tokens that run again if it starts again."""
        first = self.first
        # a search begins anew, so each of its beams generates all its tokens again
        again = self.max_branches * (first.length - first.num_tokens) if self.has_beams else 0
        return first.num_computed + again + (self.source_tokens if self.is_encoded else 0)

    @property
    def is_finished(self) -> bool:
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


class Part(NamedTuple):
    """A group that the next step may run.

    Attributes:
        remaining: number of tokens of each branch to run before one is chosen.
        least_tokens: least number of tokens that it runs in a step.
    """

    group: Group
    remaining: int
    least_tokens: int
