"""KV blocks of groups: what they need, hold and share.

With reservations, a group gets all that it may ever need before it starts. Without them it gets what its prompt needs,
and a block at a time after that.
"""

from collections.abc import Sequence

from varlen.memory.blocks import BlockPool
from varlen.request.request import Prompt
from varlen.scheduling.groups import Group
from varlen.scheduling.sequence import GeneratedSequence


class GroupMemory:
    """The block tables of all running groups.

    Attributes:
        blocks: the pool.
        reserves: whether groups reserve all that they may need.
        copies: source by destination of blocks that are copied before the next step.
    """

    def __init__(self, blocks: BlockPool, *, reserves: bool) -> None:
        self.blocks = blocks
        self.reserves = reserves
        self.copies: dict[int, int] = {}

    def need(self, prompt: Prompt, max_tokens: int, num_branches: int) -> int:
        """Return the most blocks that a prompt with its samples or beams may hold."""
        alone, more = self._branch_need(prompt, max_tokens)
        return self.blocks.blocks_of(prompt.num_source_tokens) + alone + more * (num_branches - 1)

    def start(self, group: Group, *, keep: int) -> bool:
        """Give a group its first blocks; return False if too few are available.

        Args:
            group: holds no blocks.
            keep: number of blocks that stay available for others, without reservations.
        """
        first, blocks = group.first, self.blocks
        # keys and values of a decoder depend on the source text too
        shared = [] if first.prompt.num_source_tokens else blocks.find_prefix(first.token_ids)
        source = blocks.blocks_of(first.prompt.num_source_tokens)
        if self.reserves:
            max_tokens = first.generation.max_tokens
            needed, keep = self.need(first.prompt, max_tokens, group.max_branches), 0
        else:
            needed = source + blocks.blocks_of(len(first.token_ids))
        if not blocks.reserve(needed - len(shared), shared=shared, keep=keep):
            return False
        group.reserved = needed - len(shared)
        group.source_block_ids = [self._allocate(group) for _ in range(source)]
        first.block_ids = shared
        first.num_computed = len(shared) * blocks.block_size
        return True

    def fill(self, group: Group, num_blocks: int) -> None:
        """Allocate reserved blocks of each branch until it has this number."""
        for branch in group.branches:
            while len(branch.block_ids) < num_blocks:
                branch.block_ids.append(self._allocate(group))

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

    def store(self, group: Group, begin: int) -> None:
        """Let others share the blocks that branches have filled since their token `begin`."""
        if group.first.prompt.num_source_tokens:
            return
        for branch in group.branches:
            self.blocks.store(
                branch.token_ids, branch.block_ids, begin=begin, end=branch.num_computed
            )

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
        # what it still holds is released here, not that of its samples
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
        priority, number, _ = group.order
        alone = Group((priority, number, sequence.row), (sequence,), has_started=True)
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
        unused = self.blocks.release(block_ids)
        for block in unused:
            self.copies.pop(block, None)
        return unused
