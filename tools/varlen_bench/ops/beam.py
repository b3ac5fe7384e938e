"""Calls of the beam step, which finds the best continuations of each sequence."""

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors, poison
from varlen_kernels.reference.beam import BeamCandidates, BeamEdits


def beam_step(
    sequences: int,
    beams: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    width: int | None = None,
    edits: int = 0,
    has_finished: bool = False,
) -> OpCall:
    """Return a beam step.

    A result is right if its scores, and the exact scores of its candidates, are the best scores in descending order.

    Args:
        width: candidates per sequence; None for 2 · beams.
        edits: edited tokens of each row. They overwrite logits, so such a call is right when it runs first.
        has_finished: whether to pass a `finished` tensor; it is False for all sequences.
    """
    rows, best = sequences * beams, width or 2 * beams

    def total_scores(logits: Tensor, scores: Tensor, changes: BeamEdits | None) -> Tensor:
        log_prob = torch.log_softmax(logits.double(), dim=-1)
        if changes is not None:
            log_prob[changes.rows.long(), changes.tokens.long()] *= changes.factors
        return (log_prob.view(*scores.shape, -1) + scores.double()[..., None]).flatten(1)

    def inputs(make: Tensors) -> Inputs:
        tokens = [token * (vocabulary // max(edits, 1)) for token in range(edits)] * rows
        changes = BeamEdits(
            make.ints([row for row in range(rows) for _ in range(edits)]),
            make.ints(tokens),
            make.random(rows * edits, dtype=torch.float32).abs_(),
        )
        return {
            "logits": make.random(rows, vocabulary).mul_(3),
            "scores": make.random(sequences, beams, dtype=torch.float32) - 10,
            "finished": make.ints([0] * sequences).bool() if has_finished else None,
            "edits": changes if edits else None,
            "out": poison(BeamCandidates.empty(sequences, best, make.device)),
        }

    def formula(
        logits: Tensor,
        scores: Tensor,
        finished: Tensor | None,  # noqa: ARG001
        edits: BeamEdits | None,
    ) -> Tensor:
        top = total_scores(logits, scores, edits).topk(best, dim=1).values
        return torch.stack((top, top))

    def read(result: object, inputs: Inputs) -> Tensor:
        assert isinstance(result, tuple)
        tokens, parents, scores = result
        if edits:
            # the logits are overwritten
            return torch.stack((scores.double(), scores.double()))
        # the poison of an unwritten candidate is no valid index; its score already shows the error
        index = (parents.long() * vocabulary + tokens.long()).clamp(0, beams * vocabulary - 1)
        exact = total_scores(inputs["logits"], inputs["scores"], None).gather(1, index)
        return torch.stack((scores.double(), exact))

    return OpCall(
        op="beam_step",
        shape=f"{sequences}x{beams}x{vocabulary}"
        + (f" width {width}" if width else "")
        + (f" edits {edits}" if edits else ""),
        dtype=dtype,
        inputs=inputs,
        formula=formula,
        bytes_moved=rows * vocabulary * dtype.itemsize,
        options={"width": width},
        read=read,
        threshold=1e-5,
    )
