"""The KV blocks that the beams of one search write.

As many blocks as there are beams hold the same positions of an answer. Beams that continue the same beam read its
blocks, so some of them are no longer read by any beam: these can be given back before the search ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# In the place of a block that was given back, of the prompt's last one, and of one that only the device knows.
_GIVEN_BACK, _OF_PROMPT, _UNKNOWN = -1, -2, 0


@dataclass(slots=True, eq=False)
class BeamBlocks:
    """Blocks of the beams of a search.

    A column is a place in block tables: the blocks of one column hold the same positions.

    Attributes:
        places: place of each beam among all beams that run, in the state that the device keeps of them.
        num_tokens: length of the prompt.
        block_size: tokens of a block.
        blocks: blocks of one column after another, one for each beam. The first beam goes on in the last block of the
            prompt, so a column that begins with the prompt has one less.
    """

    places: tuple[int, ...]
    num_tokens: int
    block_size: int
    blocks: list[int] = field(default_factory=list)
    # blocks of each beam when the last column began, and what beams continue since then
    _tables: list[list[int]] = field(default_factory=list)
    _parents: list[tuple[int, ...]] = field(default_factory=list)
    _num_followed: int = 0

    @property
    def num_beams(self) -> int:
        """Number of beams."""
        return len(self.places)

    def column(self, position: int) -> slice:
        """Return the place of the blocks that hold a position of the answer."""
        full, rest = divmod(self.num_tokens, self.block_size)
        begin = self.num_beams * (position // self.block_size - full) - (rest > 0)
        return slice(max(0, begin), begin + self.num_beams)

    def held(self) -> list[int]:
        """Return the blocks that were not given back."""
        return [block for block in self.blocks if block != _GIVEN_BACK]

    def tables(self, position: int, prompt_blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the block tables of beams up to a position, as a step has them.

        The first tables are the prompt's, with blocks of the beams for what they write. Later ones depend on what the
        beams continue; a block that they begin is theirs by number.

        Args:
            position: position of the token that runs.
            prompt_blocks: block table of the prompt.
        """
        column, place = divmod(position, self.block_size)
        is_first = position == self.num_tokens
        known = prompt_blocks[:column] if is_first else [_UNKNOWN] * column
        last = self.blocks[self.column(position)]
        if is_first and place:
            last = [prompt_blocks[column], *last]
        elif place:
            last = [_UNKNOWN] * self.num_beams
        return tuple(block for own in last for block in (*known, own))

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
        unread = [place for place in full if self.blocks[place] not in read]
        given_back = [self.blocks[place] for place in unread]
        for place in unread:
            self.blocks[place] = _GIVEN_BACK
        return given_back

    def _continue(self, parents: Sequence[int], position: int) -> None:
        """Let each beam have the table of the one that it continues.

        The rule is the one of `varlen_kernels.reference.follow_beams`. A table gets the block of a column once the
        first position of it has run.
        """
        place = position % self.block_size
        if position == self.num_tokens:
            own = [_OF_PROMPT, *self.blocks[self.column(position)]] if place else []
            self._tables = [[block] for block in own] or [[] for _ in parents]
            return
        before = self._tables
        if (position - 1) % self.block_size == 0:
            own = self.blocks[self.column(position - 1)]
            before = [[*table, block] for table, block in zip(before, own, strict=True)]
        self._tables = [[*before[parent]] for parent in parents]
        if not place:
            return
        unused = iter(sorted(set(range(self.num_beams)).difference(parents)))
        for beam, parent in enumerate(parents):
            if parent in parents[:beam]:
                self._tables[beam][-1] = before[next(unused)][-1]
