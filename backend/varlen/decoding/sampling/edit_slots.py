"""Slots of the edit lists on the device.

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
from varlen.scheduling.device_plan import EditLimits, Edits
from varlen.scheduling.sequence import GeneratedSequence


class EditedSequence(NamedTuple):
    """A sequence of a step whose logits are edited.

    Attributes:
        sequence, state: the sequence, and the sampler's state for it.
        length: number of tokens of its answer.
    """

    row: int
    sequence: GeneratedSequence
    state: SamplerState
    length: int


@dataclass(slots=True)
class _Slot:
    """The slot of a sequence's list.

    Attributes:
        length: tokens of the answer in the step before, if it was to use the list; else None.
    """

    number: int
    length: int | None = None


class EditSlots:
    """The slots of one device. Not for two threads at once."""

    def __init__(self, limits: EditLimits, vocab_size: int) -> None:
        """Start without a list."""
        self._limits = limits
        self._vocab_size = vocab_size
        # a sequence that ends drops its state, and with it the slot
        self._slots: WeakKeyDictionary[SamplerState, _Slot] = WeakKeyDictionary()

    def forget(self) -> None:
        """Forget all lists: the device has lost them."""
        self._slots.clear()

    def skip(self, states: Sequence[SamplerState]) -> None:
        """Note that the host chooses the next tokens of these sequences, without their lists."""
        for state in states:
            if state in self._slots:
                self._slots[state].length = None

    def next_edits(self, edited: Sequence[EditedSequence]) -> Edits | None:
        """Return the edits of the next step; None if a sequence finds no slot."""
        if not self._claim([each.state for each in edited]):
            self.skip([each.state for each in edited])
            return None
        rows = []
        for row, sequence, state, length in edited:
            slot, begun, is_added = self._slots[state], None, state.has_penalties
            if slot.length != length - 1:
                begun, is_added = state.begin_edits(sequence, length)
            slot.length = length
            bans = state.num_early_ends(length)
            rows.append(EditedRow(row, slot.number, is_added, bans, state.penalties, begun))
        return edits_of(rows)

    def _claim(self, states: Sequence[SamplerState]) -> bool:
        """Return whether each sequence has a slot now."""
        new = [state for state in states if state not in self._slots]
        most = (min(state.most_edits, self._vocab_size) for state in new)
        if any(count > self._limits.entries for count in most):
            return False
        if new and len(new) > len(self._free()):
            # such as preempted ones. Steps run in order, so a step in flight has used their lists before
            others = set(self._slots) - set(states)
            for state in others:
                del self._slots[state]
        free = self._free() if new else []
        if len(new) > len(free):
            return False
        self._slots.update(zip(new, map(_Slot, free), strict=False))
        return True

    def _free(self) -> list[int]:
        """Return the numbers of slots that no sequence has."""
        taken = {slot.number for slot in self._slots.values()}
        return [number for number in range(self._limits.slots) if number not in taken]
