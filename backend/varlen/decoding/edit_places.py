"""Places of the edit lists on the device.

A list is sent when its sequence begins. After that, each step adds one token to it. Where that may have gone wrong, the
list is sent again with all tokens that are known: a step has failed, the host has chosen a token, or the process of the
model has ended. So no step needs to know how often another one has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from varlen.decoding.edit_list import EditedRow, edits_of
from varlen.decoding.sampler_state import SamplerState
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
        self._entries = limits.entries
        self._vocab_size = vocab_size
        self._free = list(range(limits.places))
        self._places: dict[GeneratedSequence, _Place] = {}

    def forget(self) -> None:
        """Forget all lists: the device has lost them."""
        self._free += [place.number for place in self._places.values()]
        self._places.clear()

    def skip(self, sequences: Sequence[GeneratedSequence]) -> None:
        """Note that the host chooses the next tokens of these sequences, without their lists."""
        for sequence in sequences:
            if sequence in self._places:
                self._places[sequence].length = None

    def next_edits(self, edited: Sequence[EditedSequence]) -> Edits | None:
        """Return the edits of the next step; None if a sequence finds no place."""
        if not self._claim(edited):
            self.skip([each.sequence for each in edited])
            return None
        rows = []
        for row, sequence, state, length in edited:
            place, begun, is_added = self._places[sequence], None, state.has_penalties
            if place.length != length - 1:
                begun, is_added = state.begin_edits(sequence, length)
            place.length = length
            bans = state.num_early_ends(length)
            rows.append(EditedRow(row, place.number, is_added, bans, state.penalties, begun))
        return edits_of(rows)

    def _claim(self, edited: Sequence[EditedSequence]) -> bool:
        """Return whether each sequence has a place now."""
        new = [each for each in edited if each.sequence not in self._places]
        if not new:
            return True
        current = {each.sequence for each in edited}
        # steps run in their order, so a step in flight has used their lists before the next sequences begin
        for sequence in [each for each in self._places if each.status == "finished"]:
            if sequence not in current:
                self._free.append(self._places.pop(sequence).number)
        most = (min(each.state.most_edits, self._vocab_size) for each in new)
        fits = all(count <= self._entries for count in most)
        if not fits or len(new) > len(self._free):
            return False
        self._places.update((each.sequence, _Place(self._free.pop())) for each in new)
        return True
