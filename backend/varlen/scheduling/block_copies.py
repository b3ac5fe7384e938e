"""Copies of KV blocks: what the next step copies, and what steps in flight copy.

A step that fails runs again with its copies, so their sources stay as they are until it has run. A step makes only the
copies that it needs: if it fails, steps in flight that do not follow it have theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from varlen.memory.blocks import BlockPool
from varlen.scheduling.batch import Chunk


class BlockCopies:
    """Copies of the blocks of one pool.

    Attributes:
        next: source by destination of blocks that are copied before the next step that writes them.
        in_flight: copies of each step in flight that has any, in order.
        kept: sources of all these copies that no block table holds any more.
    """

    def __init__(self, blocks: BlockPool) -> None:
        """Start without a copy.

        Args:
            blocks: the pool.
        """
        self._blocks = blocks
        self.next: dict[int, int] = {}
        self.in_flight: list[dict[int, int]] = []
        self.kept: list[int] = []

    def add(self, source: int, destination: int) -> None:
        """Let the next step that writes to the copy of a block make it."""
        self.next[destination] = source

    def start(self, chunks: Iterable[Chunk]) -> dict[int, int]:
        """Return the copies of a step that starts, which change while it is in flight.

        Args:
            chunks: chunks of the step.
        """
        if not self.next:
            return {}
        # a copy is the last block of its table; the host copies none for beams
        written = {chunk.block_ids[-1] for chunk in chunks if not chunk.beams}
        copies = {copy: source for copy, source in self.next.items() if copy in written}
        if copies:
            self.next = {copy: self.next[copy] for copy in self.next if copy not in copies}
            self.in_flight.append(copies)
        return copies

    def end(self, copies: dict[int, int]) -> None:
        """Forget the copies of a step, which were made."""
        if self._remove(copies):
            self._release_kept()

    def take_back(self, copies: dict[int, int]) -> None:
        """Let a later step make the copies of one that does not run or fails."""
        if self._remove(copies):
            self.next = {**copies, **self.next}

    def forget(self) -> None:
        """Forget all copies: what the blocks hold was lost."""
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
