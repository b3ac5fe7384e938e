"""The KV blocks of groups of sequences, and what runs of them in a step.

With reservations, a group gets all the blocks that it may ever need before it starts. Without them it gets what its
prompt needs, and a block at a time after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from varlen.memory.blocks import BlockPool
from varlen.request.request import Prompt, Source
from varlen.scheduling.batch import Chunk
from varlen.scheduling.block_copies import BlockCopies
from varlen.scheduling.groups import Group, divide_step
from varlen.scheduling.sequence import GeneratedSequence

# Token ids of a chunk that runs a token which the step before it chooses.
_UNKNOWN = (0,)


class GroupMemory:
    """The block tables of all running groups.

    Attributes:
        blocks: the pool.
        reserves: whether groups reserve all that they may need.
        copies: copies of their blocks.
    """

    def __init__(self, blocks: BlockPool, *, reserves: bool) -> None:
        self.blocks = blocks
        self.reserves = reserves
        self.copies = BlockCopies(blocks)

    def need(self, prompt: Prompt, max_tokens: int, num_branches: int) -> int:
        """Return the most blocks that a prompt with its samples or beams may hold."""
        alone, more = self._branch_need(prompt, max_tokens)
        return self.blocks.blocks_of(prompt.num_source_tokens) + alone + more * (num_branches - 1)

    def least_available(self, group: Group, *, keep: int) -> int:
        """Return the number of available blocks with which a group can start; see `start`."""
        return self._first_need(group) + (0 if self.reserves else keep)

    def forget_contents(self) -> None:
        """Forget copies and what blocks hold, which was lost. No group may hold a block."""
        self.copies.forget()
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
                self.copies.add(source, copy)
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
                unused += self.copies.release(branch.block_ids)
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
        self.copies.release(table)
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
            self.copies.release(branch.block_ids)
            branch.block_ids = []
        self.copies.release(group.source_block_ids)
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
