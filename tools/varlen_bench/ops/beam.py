"""Calls of the beam step, which finds the best 2 · beams continuations of each sequence."""

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, poison
from varlen_kernels.beam_reference import BeamCandidates


def beam_step(
    sequences: int, beams: int, vocabulary: int, dtype: torch.dtype, *, has_finished: bool = False
) -> OpCall:
    """Return a beam step.

    A result is right if its scores, and the exact scores of its candidates, are the best scores in descending order.

    Args:
        has_finished: whether to pass a `finished` tensor; it is False for all sequences.
    """
    rows, best = sequences * beams, 2 * beams

    def total_scores(logits: Tensor, scores: Tensor) -> Tensor:
        log_prob = torch.log_softmax(logits.double(), dim=-1)
        return (log_prob.view(*scores.shape, -1) + scores.double()[..., None]).flatten(1)

    def formula(logits: Tensor, scores: Tensor, finished: Tensor | None) -> Tensor:  # noqa: ARG001
        top = total_scores(logits, scores).topk(best, dim=1).values
        return torch.stack((top, top))

    def read(result: object, inputs: Inputs) -> Tensor:
        assert isinstance(result, tuple)
        tokens, parents, scores = result
        # the poison of an unwritten candidate is no valid index; its score already shows the error
        index = (parents.long() * vocabulary + tokens.long()).clamp(0, beams * vocabulary - 1)
        exact = total_scores(inputs["logits"], inputs["scores"]).gather(1, index)
        return torch.stack((scores.double(), exact))

    return OpCall(
        op="beam_step",
        shape=f"{sequences}x{beams}x{vocabulary}",
        dtype=dtype,
        inputs=lambda make: {
            "logits": make.random(rows, vocabulary).mul_(3),
            "scores": make.random(sequences, beams, dtype=torch.float32) - 10,
            "finished": make.ints([0] * sequences).bool() if has_finished else None,
            "out": poison(BeamCandidates.empty(sequences, beams, make.device)),
        },
        formula=formula,
        bytes_moved=rows * vocabulary * dtype.itemsize,
        read=read,
        threshold=1e-5,
    )
