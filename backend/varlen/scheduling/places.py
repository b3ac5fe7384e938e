"""Places of running sequences, some of them for short ones only.

A request with many samples holds its places until its last token, and nothing that came after it may take them once
its turn has come. A short sequence would wait for all of that. So short ones have a few places of their own, which
they leave after few steps. docs/decisions/0044-fair-generation.md has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from varlen.scheduling.groups import Group


@dataclass(slots=True)
class Places:
    """How many sequences may run, and how many do.

    Attributes:
        count: places of all sequences.
        short_count: places beside them for short ones. Short ones beyond these take places of all.
        short_tokens: tokens of the longest short one, prompt and generated tokens together.
        others, short: running branches of other groups and of short ones.
    """

    count: int
    short_count: int
    short_tokens: int
    others: int = 0
    short: int = 0

    @property
    def taken(self) -> int:
        """All running branches."""
        return self.others + self.short

    def is_short(self, group: Group) -> bool:
        """Return whether a group may take a place for short ones."""
        first, options = group.first, group.first.generation
        # one of many samples is a part of a large request
        if max(options.n, options.num_beams) > 1:
            return False
        return first.num_tokens + group.source_tokens + options.max_tokens <= self.short_tokens

    def have(self, group: Group) -> bool:
        """Return whether there is a place for each branch of a group."""
        others, short = self.others, self.short
        if self.is_short(group):
            short += group.max_branches
        else:
            others += group.max_branches
        return others + max(0, short - self.short_count) <= self.count

    @property
    def have_short(self) -> bool:
        """Whether one of the places for short ones is free."""
        return self.short < self.short_count

    def take(self, group: Group) -> None:
        """Count a group that starts."""
        self._add(group, group.max_branches)

    def leave(self, group: Group) -> None:
        """Count a group that stops."""
        self._add(group, -group.max_branches)

    def _add(self, group: Group, branches: int) -> None:
        if self.is_short(group):
            self.short += branches
        else:
            self.others += branches
