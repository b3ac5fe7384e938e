"""Groups of sequences that are computed as one: their KV blocks and their steps.

With reservations, a group gets all the blocks that it may ever need before it starts. Without them it gets what its
prompt needs, and a block at a time after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from varlen.memory.blocks import BlockPool
from varlen.request.request import Prompt, Source
from varlen.scheduling.claims import Claim
from varlen.scheduling.sequence import Chunk, GeneratedSequence

# Token ids of a chunk that runs a token which the step before it chooses.
_UNKNOWN = (0,)


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
        branches: computed sequences: the first sequence, or the beams that are alive.
        source_tokens: length of its source text; 0 without one.
        source_block_ids: blocks of the keys and values of its source text.
        is_encoded: whether these are stored; also without a source text.
        reserved: blocks that are reserved for it and not used yet.
        has_started: whether it has run before.
    """

    order: tuple[int, int, int]
    sequences: tuple[GeneratedSequence, ...]
    claim: Claim
    first: GeneratedSequence = field(init=False)
    max_length: int = field(init=False)
    has_beams: bool = field(init=False)
    max_branches: int = field(init=False)
    branches: list[GeneratedSequence] = field(init=False)
    source_tokens: int = field(init=False)
    source_block_ids: list[int] = field(default_factory=list)
    is_encoded: bool = field(init=False)
    reserved: int = 0
    has_started: bool = False

    def __post_init__(self) -> None:
        self.first = self.sequences[0]
        self.max_length = self.first.num_tokens + self.first.generation.max_tokens
        generation = self.first.generation
        self.has_beams = self.first.is_searched
        self.max_branches = generation.num_beams if self.has_beams else len(self.sequences)
        self.branches = [self.first]
        self.source_tokens = self.first.prompt.num_source_tokens
        self.is_encoded = not self.source_tokens

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

        A search continues beams that its step chooses, and the samples of a prompt part after their first token.
        """
        return not self.first.num_unknown or not (self.has_beams or len(self.sequences) > 1)

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
        return len(self.branches) + (0 if self.is_encoded else self.source_tokens)

    @property
    def lost_tokens(self) -> int:
        """Tokens that run again if it starts again."""
        first = self.first
        generated = len(first.token_ids) - first.num_tokens
        # a search begins anew, so each of its beams generates all its tokens again
        again = self.max_branches * generated if self.has_beams else 0
        return first.num_computed + again + (self.source_tokens if self.is_encoded else 0)

    @property
    def is_finished(self) -> bool:
        """Whether it was removed, or has generated its last token."""
        if self.first.status != "finished":
            return False
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
        self.is_encoded = not self.source_tokens
        first = self.first
        first.num_computed = 0
        if self.has_beams:
            self.branches = [first]
            first.token_ids = first.prompt.token_ids.tolist()
            first.sampler_state = None


class GroupMemory:
    """The block tables of all running groups.

    Attributes:
        blocks: the pool.
        reserves: whether groups reserve all that they may need.
        copies: source by destination of blocks that are copied before the next step.
        copies_in_flight: copies of each step in flight that has any, in order.
        kept: sources of all these copies that no group holds any more.
    """

    def __init__(self, blocks: BlockPool, *, reserves: bool) -> None:
        self.blocks = blocks
        self.reserves = reserves
        self.copies: dict[int, int] = {}
        self.copies_in_flight: list[dict[int, int]] = []
        self.kept: list[int] = []

    def need(self, prompt: Prompt, max_tokens: int, num_branches: int) -> int:
        """Return the most blocks that a prompt with its samples or beams may hold."""
        alone, more = self._branch_need(prompt, max_tokens)
        return self.blocks.blocks_of(prompt.num_source_tokens) + alone + more * (num_branches - 1)

    def least_available(self, group: Group, *, keep: int) -> int:
        """Return the number of available blocks with which a group can start; see `start`."""
        return self._first_need(group) + (0 if self.reserves else keep)

    def start_copies(self) -> dict[int, int]:
        """Return the copies of a step that starts, which change while it is in flight."""
        copies, self.copies = self.copies, {}
        if copies:
            self.copies_in_flight.append(copies)
        return copies

    def end_copies(self, copies: dict[int, int]) -> None:
        """Forget the copies of the first step in flight, which were made."""
        if self.copies_in_flight and self.copies_in_flight[0] is copies:
            del self.copies_in_flight[0]
            self._release_kept()

    def return_copies(self, copies: dict[int, int]) -> None:
        """Let the next step make the copies of one that does not run."""
        if self.copies_in_flight and self.copies_in_flight[-1] is copies:
            del self.copies_in_flight[-1]
            self.copies = {**copies, **self.copies}

    def repeat_copies(self) -> None:
        """Let the next step make the copies of all steps in flight."""
        for copies in reversed(self.copies_in_flight):
            self.copies = {**copies, **self.copies}
        self.copies_in_flight.clear()

    def forget_contents(self) -> None:
        """Forget copies and what blocks hold, which was lost. No group may hold a block."""
        self.copies.clear()
        self.copies_in_flight.clear()
        self._release_kept()
        self.blocks.forget_contents()

    def held(self, group: Group) -> int:
        """Return the number of blocks that a group holds or reserves, shared ones too."""
        tables = (group.source_block_ids, *(branch.block_ids for branch in group.branches))
        return group.reserved + sum(map(len, tables))

    def freed(self, group: Group) -> int:
        """Return the number of blocks that are available once a group is released, at least."""
        tables = (group.source_block_ids, *(branch.block_ids for branch in group.branches))
        own = (block for table in tables for block in table if not self.blocks.is_shared(block))
        return group.reserved + sum(1 for _ in own)

    def start(self, group: Group, *, keep: int) -> bool:
        """Give a group its first blocks; return False if too few are available.

        Args:
            group: holds no blocks.
            keep: number of blocks that stay available for others, without reservations.
        """
        first, blocks = group.first, self.blocks
        # keys and values of a decoder depend on the source text too
        shared = (
            []
            if group.source_tokens
            else blocks.find_prefix(first.token_ids, salt=first.options.cache_salt)
        )
        source, needed = blocks.blocks_of(group.source_tokens), self._first_need(group)
        keep = 0 if self.reserves else keep
        if not blocks.reserve(needed - len(shared), shared=shared, keep=keep):
            return False
        group.reserved = needed - len(shared)
        group.source_block_ids = [self._allocate(group) for _ in range(source)]
        first.block_ids = shared
        first.num_computed = len(shared) * blocks.block_size
        return True

    def next_chunks(
        self, groups: list[Group], step_tokens: int, outputs: Mapping[GeneratedSequence, int]
    ) -> dict[Group, list[Chunk]]:
        """Return what runs of each group in the next step, with blocks for it.

        Chunks of one token come first: the others attend in a way of their own. From now on its tokens count as
        computed.

        Args:
            groups: groups of the step in order, whose branches have the block of a token to generate.
            step_tokens: see `divide_step`.
            outputs: number of the output of the step in flight, by sequence.
        """
        parts = list(zip(groups, divide_step(groups, step_tokens), strict=True))
        parts.sort(key=lambda part: part[1] > 1)
        return {group: self._chunks(group, tokens, outputs) for group, tokens in parts}

    def extend(self, group: Group) -> bool:
        """Allocate the block of each branch's next token; return False if one is not available.

        A branch that has its block keeps it.
        """
        blocks = self.blocks
        for branch in group.branches:
            table = branch.block_ids
            is_full = branch.num_computed == len(table) * blocks.block_size
            # only the block of the last token is ever shared and not full
            if not is_full and not blocks.is_shared(table[-1]):
                continue
            if not group.reserved and not blocks.available:
                return False
            if is_full:
                table.append(self._allocate(group))
            else:
                source, copy = blocks.copy_on_write(table, reserved=self._use_reserved(group))
                self.copies[copy] = source
        return True

    def store(self, group: Group, begin: int, end: int) -> None:
        """Let others share the blocks that branches have filled between these tokens."""
        size = self.blocks.block_size
        if group.source_tokens or begin // size == end // size:
            return
        for branch in group.branches:
            self.blocks.store(
                branch.token_ids,
                branch.block_ids,
                begin=begin,
                end=end,
                salt=group.first.options.cache_salt,
            )

    def undo(self, group: Group, chunks: Sequence[Chunk], *, tokens: int | None = None) -> None:
        """Let the tokens of a step run again.

        Args:
            group: a group of the step; what later steps have of it is ignored.
            chunks: its chunks in the step.
            tokens: number of the last tokens of each chunk that run again; None is all of them.
        """
        first = chunks[0]
        tokens = len(first.token_ids) if tokens is None else tokens
        for chunk in chunks:
            chunk.sequence.num_computed = first.start + len(first.token_ids) - tokens
            for sample in chunk.samples:
                sample.num_unknown = 0
        if first.encodes and tokens == len(first.token_ids):
            group.is_encoded = False

    def follow(self, group: Group, parents: Sequence[int], token_ids: Sequence[int]) -> None:
        """Replace the branches of a group, see `Group.follow`; they share the blocks of their parents."""
        branches = group.branches
        used: set[int] = set()
        for parent in parents:
            if parent in used:
                self.blocks.fork(branches[parent].block_ids)
            used.add(parent)
        unused: list[int] = []
        for place, branch in enumerate(branches):
            if place not in used:
                unused += self._release(branch.block_ids)
        group.follow(parents, token_ids)
        if self.reserves:
            # the search may need as many again
            self.blocks.reserve(len(unused))
            group.reserved += len(unused)

    def split(self, group: Group) -> list[Group]:
        """Return a group for each sample that goes on; they share their prompt's blocks."""
        first = group.first
        table, num_computed = first.block_ids, first.num_computed
        left = [sequence for sequence in group.sequences if sequence.status == "running"]
        # its own blocks are released here, not the blocks of its samples
        first.block_ids = []
        group.branches.clear()
        groups = [self._alone(group, sequence, table, num_computed) for sequence in left]
        if self.reserves:
            _, more = self._branch_need(first.prompt, first.generation.max_tokens)
            for alone in groups:
                alone.reserved = more
            # the first to write a shared block copies it; the last one writes in place, so it needs one block less
            groups[-1].reserved = group.reserved - more * (len(group.sequences) - 1)
            group.reserved -= sum(alone.reserved for alone in groups)
        self._release(table)
        self.release(group)
        return groups

    def _alone(
        self, group: Group, sequence: GeneratedSequence, table: list[int], num_computed: int
    ) -> Group:
        """Return a group of one sample, which shares the blocks of its prompt."""
        rank, number, _ = group.order
        alone = Group((rank, number, sequence.row), (sequence,), group.claim, has_started=True)
        sequence.num_computed = num_computed
        sequence.block_ids = [*table]
        self.blocks.fork(table)
        return alone

    def release(self, group: Group) -> None:
        """Release all that a group holds."""
        for branch in group.branches:
            self._release(branch.block_ids)
            branch.block_ids = []
        self._release(group.source_block_ids)
        group.source_block_ids = []
        self.blocks.unreserve(group.reserved)
        group.reserved = 0

    def _chunks(
        self, group: Group, tokens: int, outputs: Mapping[GeneratedSequence, int]
    ) -> list[Chunk]:
        """Return the next tokens of each branch of a group, see `next_chunks`."""
        first = group.first
        begin, end = first.num_computed, first.num_computed + tokens
        num_blocks = self.blocks.blocks_of(end)
        has_logits = end == first.length
        follows = outputs[first] if end > len(first.token_ids) else None
        source = None if group.is_encoded else first.prompt.payload_tokens(Source)
        source_block_ids = tuple(group.source_block_ids)
        encodes = () if source is None else tuple(source.tolist())
        chunks = []
        for branch in group.branches:
            # of those that are reserved; a sequence that generates has its block
            while len(branch.block_ids) < num_blocks:
                branch.block_ids.append(self._allocate(group))
            samples = (branch,) if group.has_beams else group.sequences
            chunk = Chunk(
                branch,
                begin,
                tuple(branch.token_ids[begin:end]) if follows is None else _UNKNOWN,
                # it has more of them after a larger step that ran out of memory
                tuple(branch.block_ids[:num_blocks]),
                samples if has_logits else (),
                source_block_ids,
                encodes,
                follows,
            )
            chunks.append(chunk)
            branch.num_computed = end
        for chunk in chunks:
            for sample in chunk.samples:
                sample.num_unknown += 1
        group.is_encoded = True
        return chunks

    def _first_need(self, group: Group) -> int:
        """Return the number of blocks that a group has when it starts, shared ones included."""
        first, blocks = group.first, self.blocks
        if self.reserves:
            return self.need(first.prompt, first.generation.max_tokens, group.max_branches)
        return blocks.blocks_of(group.source_tokens) + blocks.blocks_of(len(first.token_ids))

    def _branch_need(self, prompt: Prompt, max_tokens: int) -> tuple[int, int]:
        """Return the most blocks of a branch, and those that each further one adds."""
        length = len(prompt.token_ids)
        # the last token is never stored
        alone = self.blocks.blocks_of(length + max_tokens - 1)
        return alone, alone - length // self.blocks.block_size if max_tokens > 1 else 0

    def _allocate(self, group: Group) -> int:
        return self.blocks.allocate(reserved=self._use_reserved(group))

    def _use_reserved(self, group: Group) -> bool:
        """Return whether a group has a reserved block left, and use it."""
        is_reserved = group.reserved > 0
        group.reserved -= is_reserved
        return is_reserved

    def _release(self, block_ids: list[int]) -> list[int]:
        """Release a block table; return the blocks that are unused now."""
        if not self.copies and not self.copies_in_flight:
            # then no source of a copy is kept
            return self.blocks.release(block_ids)
        # a step that fails runs again with its copies, so their sources stay as they are
        sources = self._sources()
        kept = {each for each in block_ids if each in sources and not self.blocks.is_shared(each)}
        self.kept += kept
        unused = self.blocks.release([each for each in block_ids if each not in kept])
        for copies in (self.copies, *self.copies_in_flight):
            for block in unused:
                copies.pop(block, None)
        self._release_kept()
        return unused

    def _sources(self) -> set[int]:
        """Return the sources of all copies that are not known to be made."""
        all_copies = (self.copies, *self.copies_in_flight)
        return {source for copies in all_copies for source in copies.values()}

    def _release_kept(self) -> None:
        """Release the kept sources whose copies are made, or needed no more."""
        sources = self._sources()
        self.blocks.release([block for block in self.kept if block not in sources])
        self.kept = [block for block in self.kept if block in sources]


def groups_of_step(running: Iterable[Group], step_tokens: int) -> list[Group]:
    """Return the groups that go on and fit into a step; the first always fits."""
    groups: list[Group] = []
    tokens = 0
    for group in running:
        if group.is_ending:
            continue
        tokens += group.least_tokens
        if groups and tokens > step_tokens:
            break
        groups.append(group)
    return groups


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
