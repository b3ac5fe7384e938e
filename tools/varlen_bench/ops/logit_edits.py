"""Calls of the op that changes logits before tokens are drawn."""

from typing import Any

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors
from varlen_kernels.reference.logit_edits import EDIT_COLUMNS, KEPT, EditLists, EditState

# Most sequences of a model, and tokens of the longest list.
_PLACES, _ENTRIES = 256, 1024


def edit_logits(
    rows: int, entries: int, vocabulary: int, dtype: torch.dtype = torch.float32
) -> OpCall:
    """Return a step of sequences with penalties, whose lists are on the device.

    Args:
        rows: number of sequences.
        entries: distinct tokens of each; the last token of the answer is one of them or the next one, by turns.
        vocabulary: number of tokens.
        dtype: dtype of the model; logits are fp32.
    """
    table = [(row, row, 1, 1, KEPT, KEPT) for row in range(rows)]

    def state(make: Tensors) -> EditState:
        found = EditState.new(_PLACES, _ENTRIES, make.device)
        found.tokens[:] = make.ints([*range(_ENTRIES)])
        found.counts[:] = make.ints([each % 3 for each in range(_ENTRIES)])
        found.biases.fill_(0.5)
        found.sizes.fill_(entries)
        return found

    def begun(make: Tensors) -> EditLists:
        return EditLists(make.ints([]), make.ints([]), make.random(0, dtype=torch.float32))

    def read(result: Any, _: Inputs) -> Tensor:
        # the first token is banned
        edited: Tensor = result[0][:, 1:]
        return edited.double()

    return OpCall(
        "edit_logits",
        f"{rows}x{entries} of {vocabulary}",
        dtype,
        {
            "logits": lambda make: make.random(rows, vocabulary, dtype=torch.float32).mul_(3),
            "token_ids": [(row % 2) * entries for row in range(rows)],
            "logit_rows": [*range(rows)],
            "rows": lambda make: make.ints([n for row in table for n in row]).view(
                rows, EDIT_COLUMNS
            ),
            "penalties": lambda make: make.random(rows, 3, dtype=torch.float32).abs_().add_(0.5),
            "begun": begun,
            "state": state,
        },
        formula=_edited,
        read=read,
        written=("logits",),
        threshold=1e-5,
    )


def _edited(inputs: Inputs) -> Tensor:
    """Return the edited logits without the first token, whose ban is -inf."""
    logits: Tensor = inputs["logits"].double()[:, 1:].clone()
    repetition, presence, frequency = inputs["penalties"].double().T[:, :, None]
    state: EditState = inputs["state"]
    size = int(state.sizes[0])
    # every second row has a new token, behind its list
    edited, last = logits[:, : size - 1], logits[1::2, size - 1 : size]
    count = state.counts[: len(logits), 1:size].double()
    edited += 0.5
    edited[:] = edited.where(edited <= 0, edited / repetition).where(
        edited > 0, edited * repetition
    )
    edited -= frequency * count + presence * (count > 0)
    penalized = last.where(last <= 0, last / repetition[1::2]).where(
        last > 0, last * repetition[1::2]
    )
    last[:] = penalized - frequency[1::2] - presence[1::2]
    return logits
