"""Edit lists of sequences, as the host builds them; see `reference.logit_edits`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from varlen.request.request import Float32Array, Int32Array
from varlen.scheduling.device_plan import Edits
from varlen_kernels.reference.logit_edits import EDIT_COLUMNS, KEPT, NO_BIAS, UNSEEN


class EditList:
    """The edit list of one sequence: end tokens, then biased tokens, then others."""

    def __init__(
        self, end_ids: Sequence[int], biases: Mapping[int, float], prompt_ids: Int32Array
    ) -> None:
        """Start with an answer of no tokens.

        Args:
            end_ids: distinct tokens that end the answer, if they may come too early.
            biases: number that is added to the logit of a token; -inf bans it.
            prompt_ids: distinct tokens of the prompt, if penalties are for them too; else none.
        """
        first = np.array([*dict.fromkeys((*end_ids, *biases))], np.int32)
        others = prompt_ids[~np.isin(prompt_ids, first)]
        size = len(first) + len(others)
        self._size = size
        # made where a token is added: many lists are only sent
        self._index: dict[int, int] | None = None
        self._tokens, self._counts = np.zeros((2, size + 64), np.int32)
        self._biases = np.full(size + 64, NO_BIAS, np.float32)
        self._tokens[:size] = np.concatenate((first, others))
        self._counts[: len(first)] = np.where(np.isin(first, prompt_ids), 0, UNSEEN)
        index_of = {token: index for index, token in enumerate(first.tolist())}
        for token, bias in biases.items():
            self._biases[index_of[token]] = bias

    @property
    def arrays(self) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Tokens, counts and biases, as `EditLists` has them."""
        size = self._size
        return self._tokens[:size], self._counts[:size], self._biases[:size]

    def add(self, token_id: int) -> None:
        """Count a token of the answer."""
        if self._index is None:
            tokens = self._tokens[: self._size].tolist()
            self._index = {token: index for index, token in enumerate(tokens)}
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            if index == len(self._tokens):
                self._grow()
            self._tokens[index] = token_id
            self._size += 1
        self._counts[index] = max(self._counts[index], 0) + 1

    def _grow(self) -> None:
        nothing = np.zeros_like(self._tokens)
        self._tokens = np.concatenate((self._tokens, nothing))
        self._counts = np.concatenate((self._counts, nothing))
        self._biases = np.concatenate((self._biases, np.full_like(self._biases, NO_BIAS)))


class EditedRow(NamedTuple):
    """A row of logits that is edited.

    Attributes:
        slot: slot of its list on the device, or NO_SLOT.
        is_added: whether the token of the step is added to the list first.
        num_banned: number of first tokens of the list that are banned.
        penalties: repetition, presence and frequency penalty.
        begun: its list; None if the device has it.
    """

    row: int
    slot: int
    is_added: bool
    num_banned: int
    penalties: tuple[float, float, float]
    begun: EditList | None


def edits_of(rows: Sequence[EditedRow]) -> Edits:
    """Return edited rows as arrays."""
    table = np.empty((len(rows), EDIT_COLUMNS), np.int32)
    lists: list[tuple[Int32Array, Int32Array, Float32Array]] = [
        (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
    ]
    end = 0
    for columns, each in zip(table, rows, strict=True):
        bounds = KEPT, KEPT
        if each.begun is not None:
            lists.append(each.begun.arrays)
            bounds = end, end + len(lists[-1][0])
            end = bounds[1]
        columns[:] = each.row, each.slot, each.is_added, each.num_banned, *bounds
    penalties = np.array([each.penalties for each in rows], np.float32)
    return Edits(table, penalties, *(np.concatenate(parts) for parts in zip(*lists, strict=True)))
