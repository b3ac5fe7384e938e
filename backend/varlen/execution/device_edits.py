"""Biases, bans and penalties of sampled sequences, applied on the device of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.scheduling.choices import EditLimits, Edits
from varlen_kernels.reference.logit_edits import EditLists, EditState


class DeviceEdits:
    """The edit lists of one model on its device."""

    def __init__(self, kernels: Any, device: torch.device, limits: EditLimits) -> None:
        """Start without a list.

        Args:
            kernels: module with the op.
            device: device of the logits.
            limits: number and size of lists.
        """
        self._kernels = kernels
        self._state = EditState.new(*limits, device)
        ids = torch.empty(0, dtype=torch.int32, device=device)
        self._none_begun = EditLists(ids, ids, torch.empty(0, device=device))

    def apply(
        self,
        logits: Tensor,
        token_ids: Tensor,
        logit_rows: Tensor,
        rows: Tensor,
        penalties: Tensor,
        begun: Mapping[str, Tensor],
    ) -> None:
        """Edit the logits of a step.

        Args:
            logits, token_ids, logit_rows, rows, penalties: see `reference.edit_logits`.
            begun: `begun_arrays` on the device.
        """
        lists = EditLists(**begun) if begun else self._none_begun
        self._kernels.edit_logits(
            logits, token_ids, logit_rows, rows, penalties, lists, self._state
        )


def begun_arrays(edits: Edits | None) -> Mapping[str, npt.NDArray[np.int32 | np.float32]]:
    """Return the lists that the host sends; empty if there are none."""
    if edits is None or not len(edits.tokens):
        return {}
    return {"tokens": edits.tokens, "counts": edits.counts, "biases": edits.biases}
