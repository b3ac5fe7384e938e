"""Biases, bans and penalties of single logits before sampling, in plain torch.

A sequence has an edit list: the tokens whose logits change. Penalties count the tokens of the answer, and only the
device may know the last one. So the list stays on the device, and `edit_logits` adds the input token of a step to it.
The host sends a list when its sequence begins, and again when the list on the device may have missed a step.

Source: the repetition penalty of Keskar et al. 2019, arXiv:1909.05858; presence and frequency penalties of OpenAI's
API.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["edit_logits"]

# Columns of `rows`: row of the logits; slot of the list in the state, or NO_SLOT; whether the input token of the
# step is added to the list first; number of banned tokens, which are first in the list; begin and end of the list among
# those that the host sends, or KEPT twice for the list in the slot.
EDIT_COLUMNS = 6
NO_SLOT, KEPT = -1, -1
# Count of a token that is neither in the prompt nor in the answer: penalties do not change its logit.
UNSEEN = -1
# Added to a logit, it keeps every bit, also of -0.
NO_BIAS = -0.0


class EditLists(NamedTuple):
    """Edit lists of several sequences, one after another. Tokens of a list are distinct.

    Attributes:
        tokens: `[entries]` int32.
        counts: `[entries]` int32, how often the answer has the token; 0 if only the prompt has it, else UNSEEN.
        biases: `[entries]` fp32, added to the logit; -inf bans the token.
    """

    tokens: Tensor
    counts: Tensor
    biases: Tensor


class EditState(NamedTuple):
    """Edit lists on the device, one in each slot.

    Attributes:
        tokens, counts, biases: `[slots, entries]`, see `EditLists`.
        sizes: `[slots]` int32, entries of each list.
    """

    tokens: Tensor
    counts: Tensor
    biases: Tensor
    sizes: Tensor

    @classmethod
    def new(cls, slots: int, entries: int, device: torch.device) -> "EditState":
        """Return slots for lists of at most this many entries."""
        tokens, counts = torch.empty(2, slots, entries, dtype=torch.int32, device=device)
        biases = torch.empty(slots, entries, device=device)
        return cls(tokens, counts, biases, torch.zeros(slots, dtype=torch.int32, device=device))


def edit_logits(
    logits: Tensor,
    token_ids: Tensor,
    logit_rows: Tensor,
    rows: Tensor,
    penalties: Tensor,
    begun: EditLists,
    state: EditState,
) -> None:
    """Change the logits of the tokens of some sequences' lists.

    The bias of a token is added to its logit. If the prompt or the answer has the token, penalties follow: a positive
    logit is divided by the repetition penalty, another one is multiplied by it, then the frequency penalty is
    subtracted for each time that the answer has the token, and the presence penalty if it has it. Banned tokens become
    -inf. Each operation rounds to fp32.

    Args:
        logits: `[logit rows, vocabulary]` fp32; changed.
        token_ids: `[tokens]` int32 of the step.
        logit_rows: `[logit rows]` int32, token that each row of the logits follows.
        rows: `[edited rows, EDIT_COLUMNS]` int32; no row and no slot is there twice.
        penalties: `[edited rows, 3]` fp32: repetition, presence and frequency penalty.
        begun: lists that the host sends.
        state: changed; a list needs an entry for each token that is added.

    Raises:
        ValueError: a tensor has another shape or dtype.
    """
    check_edits(logits, rows, penalties, begun, state)
    of_rows = zip(rows.tolist(), penalties, strict=True)
    for (row, slot, is_added, num_banned, begin, end), own_penalties in of_rows:
        if end == KEPT:
            size = int(state.sizes[slot])
            entries = [each[slot, :size] for each in state[:3]]
        else:
            entries = [each[begin:end] for each in begun]
        if is_added:
            entries = _with_token(token_ids[logit_rows[row]], *entries)
        tokens, counts, biases = entries
        if slot != NO_SLOT:
            state.sizes[slot] = len(tokens)
            for kept, values in zip(state[:3], entries, strict=True):
                kept[slot, : len(tokens)] = values
        edited = _edited(logits[row, tokens.long()], counts, biases, own_penalties)
        edited[:num_banned] = -torch.inf
        logits[row, tokens.long()] = edited


def check_edits(
    logits: Tensor, rows: Tensor, penalties: Tensor, begun: EditLists, state: EditState
) -> None:
    """Check the arguments of `edit_logits`, fused or reference.

    Raises:
        ValueError: a tensor has another shape or dtype; the message names it.
    """
    count, (slots, entries) = len(rows), state.tokens.shape
    of_begun, of_state = begun.tokens.shape, (slots, entries)
    for name, tensor, shape, dtype in (
        ("logits", logits, (len(logits), logits.shape[-1]), torch.float32),
        ("rows", rows, (count, EDIT_COLUMNS), torch.int32),
        ("penalties", penalties, (count, 3), torch.float32),
        ("begun.tokens", begun.tokens, (len(begun.tokens),), torch.int32),
        ("begun.counts", begun.counts, of_begun, torch.int32),
        ("begun.biases", begun.biases, of_begun, torch.float32),
        ("state.tokens", state.tokens, of_state, torch.int32),
        ("state.counts", state.counts, of_state, torch.int32),
        ("state.biases", state.biases, of_state, torch.float32),
        ("state.sizes", state.sizes, (slots,), torch.int32),
    ):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}; it must be {list(shape)} {dtype}"
            )


def _with_token(token: Tensor, tokens: Tensor, counts: Tensor, biases: Tensor) -> list[Tensor]:
    """Return a list whose answer has a token more."""
    found = tokens == token
    if found.any():
        return [tokens, torch.where(found, counts.clamp_min(0) + 1, counts), biases]
    new = torch.stack((token, torch.ones_like(token)))[:, None]
    bias = biases.new_full((1,), NO_BIAS)
    return [torch.cat(pair) for pair in ((tokens, new[0]), (counts, new[1]), (biases, bias))]


def _edited(logits: Tensor, counts: Tensor, biases: Tensor, penalties: Tensor) -> Tensor:
    """Return logits with their biases and penalties."""
    repetition, presence, frequency = penalties
    biased, number = logits + biases, counts.clamp_min(0).float()
    penalized = torch.where(biased > 0, biased / repetition, biased * repetition)
    penalized = penalized - frequency * number - presence * (number > 0)
    return torch.where(counts == UNSEEN, biased, penalized)
