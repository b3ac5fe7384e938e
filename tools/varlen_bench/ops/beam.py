"""Calls of the beam step: the best 2K continuations of sequences with K beams."""

from __future__ import annotations

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, poison
from varlen_kernels.beam_reference import BeamCandidates


def beam_step(
    sequences: int, beams: int, vocabulary: int, dtype: torch.dtype, *, has_finished: bool = False
) -> OpCall:
    """Return one beam step.

    A result is right if both the scores that it reports and the exact scores of its candidates are the best, in order.

    Args:
        has_finished: whether the kernel is told which sequences are finished; none is.
    """
    rows, best = sequences * beams, 2 * beams

    def total(logits: Tensor, scores: Tensor) -> Tensor:
        log_prob = torch.log_softmax(logits.double(), dim=-1)
        return (log_prob.view(*scores.shape, -1) + scores.double()[..., None]).flatten(1)

    def formula(logits: Tensor, scores: Tensor, finished: Tensor | None) -> Tensor:  # noqa: ARG001
        top = total(logits, scores).topk(best, dim=1).values
        return torch.stack((top, top))

    def read(result: object, inputs: Inputs) -> Tensor:
        assert isinstance(result, tuple)
        tokens, parents, scores = result
        # the score shows that a candidate was never written; without the clamp it would crash
        at = (parents.long() * vocabulary + tokens.long()).clamp(0, beams * vocabulary - 1)
        named = total(inputs["logits"], inputs["scores"]).gather(1, at)
        return torch.stack((scores.double(), named))

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
