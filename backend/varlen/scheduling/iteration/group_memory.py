"""The KV blocks of groups, and the chunks that a step runs.

With reservations, a group gets all the blocks that it may ever need before it starts. Without them it gets what its
prompt needs, and a block at a time after that.

The beams of a search write into blocks of their own. Which of them a beam reads is decided where its tokens are chosen
(`varlen_kernels.reference.beam_search`), so a step does not have to wait for the one before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from varlen.memory.blocks import BlockPool
from varlen.request.request import Prompt, Source, new_tuple
from varlen.scheduling.batch import Chunk, GeneratedSequence
from varlen.scheduling.iteration.groups import BeamBlocks, Group, Part


class BlockCopies:
    """Copies of the blocks of one pool.

    Attributes:
        next: source by destination of blocks that are copied before the next step that writes them.
        in_flight: copies of each step in flight that has any, in order.
        kept: sources of all these copies that no block table holds any more.
    """

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self.next: dict[int, int] = {}
        self.in_flight: list[dict[int, int]] = []
        self.kept: list[int] = []

    def assign(self, chunks: Iterable[Chunk]) -> dict[int, int]:
        """Return the copies that the step of these chunks makes.

        They change while it is in flight.
        """
        # a copy is the last block of its table; the host copies none for beams
        written = {chunk.block_ids[-1] for chunk in chunks if not chunk.beams}
        copies = {copy: source for copy, source in self.next.items() if copy in written}
        if copies:
            self.next = {copy: self.next[copy] for copy in self.next if copy not in copies}
            self.in_flight.append(copies)
        return copies

    def end(self, copies: dict[int, int]) -> None:
        if self._remove(copies):
            self._release_kept()

    def take_back(self, copies: dict[int, int]) -> None:
        """Let a later step make the copies of one that does not run or fails."""
        if self._remove(copies):
            self.next = {**copies, **self.next}

    def forget(self) -> None:
        """Forget all copies: the contents of the blocks were lost."""
        self.next.clear()
        self.in_flight.clear()
        self._release_kept()

    def release(self, block_ids: Sequence[int]) -> None:
        """Release a block table."""
        if not self.next and not self.in_flight:
            # then no source of a copy is kept
            self._blocks.release(block_ids)
            return
        sources, blocks = self.sources(), self._blocks
        kept = {each for each in block_ids if each in sources and not blocks.is_shared(each)}
        self.kept += kept
        unused = blocks.release([each for each in block_ids if each not in kept])
        for copies in (self.next, *self.in_flight):
            for block in unused:
                copies.pop(block, None)
        self._release_kept()

    def sources(self) -> set[int]:
        """Return the sources of all copies that are not known to be made."""
        return {source for copies in (self.next, *self.in_flight) for source in copies.values()}

    def _remove(self, copies: dict[int, int]) -> bool:
        """Remove copies in flight; return whether they were there."""
        others = [each for each in self.in_flight if each is not copies]
        was_there = len(others) < len(self.in_flight)
        self.in_flight = others
        return was_there

    def _release_kept(self) -> None:
        """Release the kept sources whose copies are made, or needed no more."""
        sources = self.sources()
        self._blocks.release([block for block in self.kept if block not in sources])
        self.kept = [block for block in self.kept if block in sources]


# Token ids of a chunk that runs a token which the step before it chooses.
_UNKNOWN = (0,)


class GroupMemory:
    """The block tables of all running groups.

    Attributes:
        reserves: whether groups reserve all that they may need.
    """

    def __init__(self, blocks: BlockPool, *, reserves: bool) -> None:
        self.blocks = blocks
        self.reserves = reserves
        self.copies = BlockCopies(blocks)
        # slots of beams that none has, and how many there are
        self._free_slots: list[int] = []
        self._num_slots = 0

    def need(self, prompt: Prompt, max_tokens: int, num_branches: int) -> int:
        """Return the most blocks that a prompt with its samples or beams may hold."""
        alone, more = self._branch_need(prompt, max_tokens)
        return self.blocks.blocks_of(prompt.num_source_tokens) + alone + more * (num_branches - 1)

    def least_available(self, group: Group, *, keep: int) -> int:
        """Return the number of available blocks with which a group can start; see `allocate_first`."""
        return self._first_need(group) + (0 if self.reserves else keep)

    def forget_contents(self) -> None:
        """Forget copies and the lost contents of blocks. No group may hold a block."""
        self.copies.forget()
        self.blocks.forget_contents()

    def held(self, group: Group) -> int:
        """Return the number of blocks that a group holds or reserves, shared ones too."""
        return group.reserved + len(_blocks(group))

    def freed(self, group: Group) -> int:
        """Return the number of blocks that are available once a group is released, at least."""
        is_shared = self.blocks.is_shared
        return group.reserved + sum(not is_shared(block) for block in _blocks(group))

    def allocate_first(self, group: Group, *, keep: int) -> bool:
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
            else blocks.find_prefix(first.token_ids, salt=first.options.cache_scope)
        )
        source, needed = blocks.blocks_of(group.source_tokens), self._first_need(group)
        keep = 0 if self.reserves else keep
        if not blocks.reserve(needed - len(shared), shared=shared, keep=keep):
            return False
        group.reserved = needed - len(shared)
        group.source_block_ids = self._allocate(group, source)
        first.block_ids = array("i", shared)
        first.num_computed = len(shared) * blocks.block_size
        if group.has_beams:
            slots = self._take_slots(group.max_branches)
            group.beams = BeamBlocks(slots, first.num_tokens, blocks.block_size)
        return True

    def next_chunks(
        self,
        parts: Sequence[Part],
        step_tokens: int,
        logit_rows: Mapping[GeneratedSequence, int],
        *,
        begins_beams: bool,
    ) -> dict[Group, Chunk]:
        """Return what runs of each group in the next step, with blocks for it.

        Chunks of one token come first: the others attend in a way of their own. From now on its tokens count as
        computed.

        Args:
            parts: groups of the step in order, whose branches have the block of a token to generate.
            logit_rows: row of the logits of the step in flight, by sequence.
            begins_beams: whether prompts, of one token, run for each beam.
        """
        lengths = divide_step(parts, step_tokens)
        runs = list(zip(parts, lengths, strict=True))
        if max(lengths) > 1:
            runs.sort(key=lambda run: run[1] > 1)
        chunk_of = partial(self._chunk, logit_rows=logit_rows, begins_beams=begins_beams)
        return {part.group: chunk_of(part, length) for part, length in runs}

    def draft_rows(
        self, group: Group, chunk: Chunk, guessed: Sequence[int], *, keep: int
    ) -> tuple[Chunk, ...]:
        """Return a row for each drafted token behind a chunk; fewer if blocks are few.

        Args:
            guessed: tokens behind the known ones; the first one stands for a token that the chunk does not know.
            keep: see `allocate_first`.
        """
        table, size, rows = group.first.block_ids, self.blocks.block_size, list[Chunk]()
        begin = chunk.end - (chunk.follows is not None)
        for position in range(chunk.end, begin + len(guessed)):
            if position == len(table) * size:
                if not group.reserved and self.blocks.available <= keep:
                    break
                table.extend(self._allocate(group, 1))
            drafted = tuple(guessed[: position - begin + 1])
            row = chunk._replace(
                start=position, token_ids=drafted[-1:], follows=None, drafted=drafted
            )
            rows.append(row._replace(block_ids=table[: position // size + 1]))
        return tuple(rows)

    def give_back(self, group: Group) -> None:
        """Release blocks of drafted tokens that were not chosen, unless they are reserved."""
        first = group.first
        kept = self.blocks.blocks_of(first.num_computed)
        if not self.reserves and kept < len(first.block_ids):
            self.copies.release(first.block_ids[kept:])
            del first.block_ids[kept:]

    def lacking(self, parts: Iterable[Part]) -> list[Group]:
        """Return the groups that generate and may lack a block for their next tokens."""
        size, is_shared = self.blocks.block_size, self.blocks.is_shared
        return [
            group
            for group, remaining, _ in parts
            if remaining == 1
            and group.is_encoded
            and (
                (first := group.first).num_computed == len(first.block_ids) * size
                # beams begin blocks together
                or (
                    group.beams is not None
                    and (first.num_computed % size == 0 or first.num_computed == first.num_tokens)
                )
                or is_shared(first.block_ids[-1])
            )
        ]

    def extend(self, group: Group) -> bool:
        """Allocate the block of each branch's next token; return False if one is not available.

        A branch that has its block keeps it.
        """
        first, blocks = group.first, self.blocks
        if group.beams is not None and first.num_computed >= first.num_tokens:
            return self._extend_beams(group, group.beams)
        table = first.block_ids
        is_full = first.num_computed == len(table) * blocks.block_size
        # only the block of the last token is ever shared and not full
        if not is_full and not blocks.is_shared(table[-1]):
            return True
        if not group.reserved and not blocks.available:
            return False
        if is_full:
            table.extend(self._allocate(group, 1))
        else:
            is_reserved = group.reserved > 0
            group.reserved -= is_reserved
            source, copy = blocks.copy_on_write(table, reserved=is_reserved)
            self.copies.next[copy] = source
        return True

    def _extend_beams(self, group: Group, beams: BeamBlocks) -> bool:
        lacking = beams.column(group.first.num_computed).stop - len(beams.blocks)
        if lacking > group.reserved + self.blocks.available:
            return False
        beams.blocks += self._allocate(group, lacking)
        return True

    def run_on(self, group: Group, chunk: Chunk, steps: int) -> None:
        """Let a group go on behind some steps; behind none, its chunk runs again."""
        group.first.num_computed = chunk.start + steps
        for sample in chunk.samples:
            sample.num_unknown = chunk.end + steps - len(sample.token_ids)
        if chunk.encodes:
            group.is_encoded = steps > 0

    def follow(self, group: Group, parents: Sequence[int], steps: int) -> None:
        """Give back blocks that no beam of a search reads any more.

        Args:
            parents: the beam of the last step that each beam continues; of several steps, one after another.
        """
        # with reservations it may need as many again
        if group.beams is not None and not self.reserves:
            count = len(parents) // max(1, steps)
            for step in range(steps):
                of_step = parents[step * count : (step + 1) * count]
                self.copies.release(group.beams.follow(of_step))

    def store(self, group: Group, chunk: Chunk, end: int) -> None:
        """Let others share the blocks that a chunk has filled.

        Args:
            end: position after its last token that does not run again.
        """
        begin, size = chunk.start, self.blocks.block_size
        if begin // size == end // size or chunk.beams or group.source_tokens:
            return
        first = group.first
        self.blocks.store(
            first.token_ids, first.block_ids, begin=begin, end=end, salt=first.options.cache_scope
        )

    def split(self, group: Group) -> list[Group]:
        """Return a group for each sample that goes on; they share their prompt's blocks."""
        first = group.first
        table, num_computed = first.block_ids, first.num_computed
        left = [sequence for sequence in group.sequences if sequence.status == "running"]
        # its own blocks are released here, not the blocks of its samples
        first.block_ids = array("i")
        groups = [self._alone(group, sequence, table, num_computed) for sequence in left]
        if self.reserves:
            _, more = self._branch_need(first.prompt, first.generation.max_tokens)
            for alone in groups:
                alone.reserved = more
            # the first to write a shared block copies it; the last one writes in place, so it needs one block less
            groups[-1].reserved = group.reserved - more * (len(group.sequences) - 1)
            group.reserved -= sum(alone.reserved for alone in groups)
        self.copies.release(table)
        # its first sequence has a table again, which is not its own
        self._unreserve(group)
        return groups

    def _alone(
        self, group: Group, sequence: GeneratedSequence, table: array[int], num_computed: int
    ) -> Group:
        """Return a group of one sample, which shares the blocks of its prompt."""
        rank, number, _ = group.order
        alone = Group((rank, number, sequence.row), (sequence,), group.claim, has_started=True)
        sequence.num_computed = num_computed
        sequence.block_ids = table[:]
        self.blocks.fork(table)
        return alone

    def release(self, group: Group) -> None:
        self.copies.release(_blocks(group))
        group.first.block_ids = array("i")
        if group.beams is not None:
            self._free_slots += group.beams.slots
        group.source_block_ids, group.beams = [], None
        self._unreserve(group)

    def _chunk(
        self,
        part: Part,
        tokens: int,
        logit_rows: Mapping[GeneratedSequence, int],
        *,
        begins_beams: bool,
    ) -> Chunk:
        """Return the next tokens of a group, see `next_chunks`."""
        group, size = part.group, self.blocks.block_size
        first, beams = group.first, 0
        samples: tuple[GeneratedSequence, ...] = ()
        begin, end = first.num_computed, first.num_computed + tokens
        if group.is_plain and part.remaining == 1 and len(first.block_ids) * size >= end:
            # most chunks of most steps
            first.num_computed = end
            is_known = not first.num_unknown
            token_ids: tuple[int, ...] = (first.token_ids[begin],) if is_known else _UNKNOWN
            follows = None if is_known else logit_rows[first]
            first.num_unknown += 1
            table = first.block_ids[: begin // size + 1]
            fields = first, begin, token_ids, table, group.sequences, (), (), follows, (), 0, ()
            return new_tuple(Chunk, fields)
        if tokens == part.remaining:
            samples = (first,) if group.has_beams else group.sequences
        source = None if group.is_encoded else first.prompt.payload_tokens(Source)
        follows = None
        if group.beams is not None and (begins_beams or begin >= first.num_tokens):
            beams, own = group.max_branches, _UNKNOWN
            if begin < first.num_tokens:
                own = (first.token_ids[begin],)
                self.extend(group)
                self._extend_beams(group, group.beams)
            token_ids, block_ids = own * beams, group.beams.tables(begin, first.block_ids)
        else:
            num_blocks = -(-end // size)
            # of those that are reserved; a sequence that generates has its block
            first.block_ids.extend(self._allocate(group, num_blocks - len(first.block_ids)))
            token_ids = tuple(first.token_ids[begin:end])
            if end > len(first.token_ids):
                token_ids, follows = _UNKNOWN, logit_rows[first]
            # it has more of them after a larger step that ran out of memory
            block_ids = first.block_ids[:num_blocks]
        chunk = Chunk(
            first,
            begin,
            token_ids,
            block_ids,
            samples,
            tuple(group.source_block_ids),
            () if source is None else tuple(source.tolist()),
            follows,
            () if group.beams is None else group.beams.slots,
            beams,
        )
        first.num_computed = end
        for sample in samples:
            sample.num_unknown += 1
        group.is_encoded = True
        return chunk

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

    def _allocate(self, group: Group, count: int) -> list[int]:
        """Return blocks for a group, its reserved ones first."""
        count = max(0, count)
        reserved = min(count, group.reserved)
        group.reserved -= reserved
        return self.blocks.allocate(count, reserved=reserved)

    def _unreserve(self, group: Group) -> None:
        self.blocks.unreserve(group.reserved)
        group.reserved = 0

    def _take_slots(self, count: int) -> tuple[int, ...]:
        free = self._free_slots
        while len(free) < count:
            free.append(self._num_slots)
            self._num_slots += 1
        slots = tuple(free[-count:])
        del free[-count:]
        return slots


def _blocks(group: Group) -> list[int]:
    """Return the blocks that a group holds."""
    own = [] if group.beams is None else group.beams.held()
    return [*group.first.block_ids, *group.source_block_ids, *own]


def divide_step(parts: Sequence[Part], step_tokens: int) -> list[int]:
    """Return the number of tokens of each branch of the groups.

    Each has one, and prompts have the rest in order.

    Args:
        step_tokens: number of tokens of the step, unless the groups run more in any case.
    """
    lengths = [1] * len(parts)
    prompts = [(place, part) for place, part in enumerate(parts) if part.remaining > 1]
    if not prompts:
        return lengths
    spare = max(0, step_tokens - sum([part.least_tokens for part in parts]))
    for place, part in prompts:
        more = min(part.remaining - 1, spare)
        lengths[place] += more
        spare -= more
    return lengths
