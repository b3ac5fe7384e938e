"""Places of the edit lists on the device.

A list is sent when its sequence begins. After that, each step adds one token to it. Where that may have gone wrong, the
list is sent again with all tokens that are known: a step has failed, the host has chosen a token, or the process of the
model has ended. So no step needs to know how often another one has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from varlen.decoding.sampling.edit_list import EditedRow, edits_of
from varlen.decoding.sampling.sampler_state import SamplerState
from varlen.scheduling.choices import EditLimits, Edits
from varlen.scheduling.sequence import GeneratedSequence


class EditedSequence(NamedTuple):
    """A sequence of a step whose logits are edited.

    Attributes:
        row: its row of the logits.
        sequence, state: the sequence, and what the sampler keeps of it.
        length: number of tokens of its answer.
    """

    row: int
    sequence: GeneratedSequence
    state: SamplerState
    length: int


@dataclass(slots=True)
class _Place:
    """The place of a sequence's list.

    Attributes:
        number: its number.
        length: tokens of the answer in the step before, if it was to use the list; else None.
    """

    number: int
    length: int | None = None


class EditPlaces:
    """The places of one device. Not for two threads at once."""

    def __init__(self, limits: EditLimits, vocab_size: int) -> None:
        """Start without a list."""
        self._limits = limits
        self._vocab_size = vocab_size
        # a sequence that ends drops its state, and with it the place
        self._places: WeakKeyDictionary[SamplerState, _Place] = WeakKeyDictionary()

    def forget(self) -> None:
        """Forget all lists: the device has lost them."""
        self._places.clear()

    def skip(self, states: Sequence[SamplerState]) -> None:
        """Note that the host chooses the next tokens of these sequences, without their lists."""
        for state in states:
            if state in self._places:
                self._places[state].length = None

    def next_edits(self, edited: Sequence[EditedSequence]) -> Edits | None:
        """Return the edits of the next step; None if a sequence finds no place."""
        if not self._claim([each.state for each in edited]):
            self.skip([each.state for each in edited])
            return None
        rows = []
        for row, sequence, state, length in edited:
            place, begun, is_added = self._places[state], None, state.has_penalties
            if place.length != length - 1:
                begun, is_added = state.begin_edits(sequence, length)
            place.length = length
            bans = state.num_early_ends(length)
            rows.append(EditedRow(row, place.number, is_added, bans, state.penalties, begun))
        return edits_of(rows)

    def _claim(self, states: Sequence[SamplerState]) -> bool:
        """Return whether each sequence has a place now."""
        new = [state for state in states if state not in self._places]
        most = (min(state.most_edits, self._vocab_size) for state in new)
        if any(count > self._limits.entries for count in most):
            return False
        if new and len(new) > len(self._free()):
            # such as preempted ones. Steps run in order, so a step in flight has used their lists before
            others = set(self._places) - set(states)
            for state in others:
                del self._places[state]
        free = self._free() if new else []
        if len(new) > len(free):
            return False
        self._places.update(zip(new, map(_Place, free), strict=False))
        return True

    def _free(self) -> list[int]:
        """Return the numbers of places that no sequence has."""
        taken = {place.number for place in self._places.values()}
        return [number for number in range(self._limits.places) if number not in taken]
