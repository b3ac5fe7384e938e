"""Sequences with random edits of their logits, and the formulas in float64."""

import numpy as np
import torch

from varlen_kernels.reference.logit_edits import (
    EDIT_COLUMNS,
    KEPT,
    NO_BIAS,
    NO_SLOT,
    UNSEEN,
    EditLists,
    EditState,
)


class EditedSequences:
    """Sequences with random edits, each with a slot of its own but perhaps one.

    Attributes:
        vocabulary: number of tokens.
        answers: tokens of each answer so far.
    """

    def __init__(self, seed, vocabulary, count, longest=9):
        self.rng = rng = np.random.default_rng(seed)
        self.vocabulary, self.count = vocabulary, count
        self.answers = [[] for _ in range(count)]
        self.slots = rng.permutation(count + 2)[:count].tolist()
        self.slots[0] = self.slots[0] if seed % 3 else NO_SLOT
        self.lists, self.bans, self.penalties = [], [], []
        for _ in range(count):
            size = int(rng.integers(0, min(vocabulary, longest) + 1))
            tokens = rng.permutation(vocabulary)[:size].astype(np.int32)
            counts = rng.choice([UNSEEN, 0, 1, 3], size).astype(np.int32)
            biases = rng.choice([NO_BIAS, 0.0, 1.7, -20.1, -np.inf], size).astype(np.float32)
            self.lists.append([tokens, counts, biases])
            self.bans.append(int(rng.integers(0, size + 1)))
            penalties = [(1.0, 1.3, 0.01, 100.0), (0.0, -2.0, 0.7), (0.0, 1.1, -0.3)]
            self.penalties.append([float(rng.choice(each)) for each in penalties])

    def state(self, device, extra=0):
        """Return slots for the lists, with numbers that nothing may read."""
        state = EditState.new(self.count + 2, self.vocabulary + extra, torch.device(device))
        for each in state:
            each.fill_(torch.nan if each.is_floating_point() else 1 << 30)
        return state

    def step(self, *, begins):
        """Return the arguments of a step, without the state.

        Args:
            begins: whether the host sends each list, with the tokens of its answer so far; the others have a slot.
        """
        order = self.rng.permutation(self.count).tolist()
        token_ids = self.rng.integers(0, self.vocabulary, self.count + 3).astype(np.int32)
        logit_rows = self.rng.permutation(self.count + 3).astype(np.int32)
        rows, begun, end = [], [], 0
        for each in order:
            is_added = bool(self.rng.random() < 0.8)
            row = [each, self.slots[each], is_added, self.bans[each], KEPT, KEPT]
            if begins[each] or self.slots[each] == NO_SLOT:
                begun.append(self.current_list(each))
                row[4:], end = [end, end + len(begun[-1][0])], end + len(begun[-1][0])
            rows.append(row)
            if is_added:
                self.answers[each].append(int(token_ids[logit_rows[each]]))
        logits = self.rng.normal(size=(self.count + 3, self.vocabulary)).astype(np.float32)
        logits[self.rng.random(logits.shape) < 0.05] = -0.0
        logits[self.rng.random(logits.shape) < 0.02] = -np.inf
        empty = [np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)]
        lists = [np.concatenate(parts) for parts in zip(empty, *begun, strict=True)]
        arrays = [
            logits,
            token_ids,
            logit_rows,
            np.array(rows, np.int32).reshape(-1, EDIT_COLUMNS),
            np.array([self.penalties[each] for each in order], np.float32).reshape(-1, 3),
        ]
        return [*map(torch.from_numpy, arrays), EditLists(*map(torch.from_numpy, lists))]

    def current_list(self, number):
        """Return the list of a sequence with the tokens of its answer so far."""
        tokens, counts, biases = (each.tolist() for each in self.lists[number])
        for token in self.answers[number]:
            if token not in tokens:
                tokens.append(token)
                counts.append(0)
                biases.append(NO_BIAS)
            place = tokens.index(token)
            counts[place] = max(counts[place], 0) + 1
        return [
            np.array(tokens, np.int32),
            np.array(counts, np.int32),
            np.array(biases, np.float32),
        ]

    def expected(self, logits):
        """Return the edited logits after a step, in float64, where they are not infinite."""
        found = logits.double().numpy().copy()
        for row in range(self.count):
            repetition, presence, frequency = np.array(self.penalties[row], np.float32).tolist()
            for entry, (token, count, bias) in enumerate(zip(*self.current_list(row), strict=True)):
                x = found[row, token] + float(bias)
                if count != UNSEEN:
                    x = x / repetition if x > 0 else x * repetition
                    x -= frequency * int(count) + presence * bool(count)
                found[row, token] = -np.inf if entry < self.bans[row] else x
        return torch.from_numpy(found)
