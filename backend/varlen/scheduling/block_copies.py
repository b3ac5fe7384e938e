"""Copies of KV blocks: what the next step copies, and what steps in flight copy.

A step that fails runs again with its copies, so their sources stay as they are until it has run.
"""

from __future__ import annotations

from collections.abc import Sequence

from varlen.memory.blocks import BlockPool


class BlockCopies:
    """Copies of the blocks of one pool.

    Attributes:
        next: source by destination of blocks that are copied before the next step.
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
        """Let the next step copy a block."""
        self.next[destination] = source

    def start(self) -> dict[int, int]:
        """Return the copies of a step that starts, which change while it is in flight."""
        copies, self.next = self.next, {}
        if copies:
            self.in_flight.append(copies)
        return copies

    def end(self, copies: dict[int, int]) -> None:
        """Forget the copies of the first step in flight, which were made."""
        if self.in_flight and self.in_flight[0] is copies:
            del self.in_flight[0]
            self._release_kept()

    def take_back(self, copies: dict[int, int]) -> None:
        """Let the next step make the copies of one that does not run."""
        if self.in_flight and self.in_flight[-1] is copies:
            del self.in_flight[-1]
            self.next = {**copies, **self.next}

    def repeat(self) -> None:
        """Let the next step make the copies of all steps in flight."""
        for copies in reversed(self.in_flight):
            self.next = {**copies, **self.next}
        self.in_flight.clear()

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

    def _release_kept(self) -> None:
        """Release the kept sources whose copies are made, or needed no more."""
        sources = self.sources()
        self._blocks.release([block for block in self.kept if block not in sources])
        self.kept = [block for block in self.kept if block in sources]
