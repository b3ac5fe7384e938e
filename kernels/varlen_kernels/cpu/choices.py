"""Choices of tokens on CPUs."""

import numpy as np
import torch
from torch import Tensor

from varlen_kernels import reference
from varlen_kernels.cpu.calls.calls import run_function
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.functions import STEP_BEAMS
from varlen_kernels.reference.beam import BeamCandidates, BeamEdits, check_beams


def best_tokens(logits: Tensor) -> Tensor:
    """Return the first token with the largest logit, for each row of `[rows, vocabulary]`: `[rows]` int64."""
    # torch takes ten times as long, see decision 0019
    return torch.from_numpy(logits.numpy().argmax(1))


def beam_step(
    logits: Tensor,
    scores: Tensor,
    finished: Tensor | None = None,
    *,
    width: int | None = None,
    edits: BeamEdits | None = None,
    out: BeamCandidates | None = None,
) -> BeamCandidates:
    """Return `reference.beam_step`, compiled."""
    if not has_compiled_ops():
        return reference.beam_step(logits, scores, finished, width=width, edits=edits, out=out)
    width = check_beams(logits, scores, finished, width, edits, out)
    if out is None:
        out = BeamCandidates.empty(len(scores), width, logits.device)
    if finished is None:
        finished = torch.zeros(len(scores), dtype=torch.bool)
    edited = _edits_of_rows(edits, len(logits))
    run_function(STEP_BEAMS, (logits.float(), scores, finished, *edited, *out))
    return out


def _edits_of_rows(edits: BeamEdits | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds of the edits of each row, their tokens and their factors."""
    if edits is None:
        none = torch.empty(0)
        return torch.zeros(rows + 1, dtype=torch.int64), none.int(), none
    bounds = np.searchsorted(edits.rows.numpy(), np.arange(rows + 1))
    return torch.from_numpy(bounds), edits.tokens, edits.factors
