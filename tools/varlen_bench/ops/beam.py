"""Calls of the beam step: the best 2K continuations of sequences with K beams."""

from __future__ import annotations

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors, poison
from varlen_kernels.beam_reference import BeamCandidates


def beam_step(
    sequences: int, beams: int, vocabulary: int, dtype: torch.dtype, *, finished: bool = False
) -> OpCall:
    """Return one beam step.

    A result is right if both the scores that it reports and the exact scores of its candidates are the best, in order.

    Args:
        finished: whether the kernel is told which sequences are finished; none is.
    """
    rows, best = sequences * beams, 2 * beams

    def inputs(make: Tensors) -> Inputs:
        none = torch.zeros(sequences, dtype=torch.bool, device=make.device)
        return {
            "logits": make.random(rows, vocabulary).mul_(3),
            "scores": make.random(sequences, beams, dtype=torch.float32) - 10,
            "finished": none if finished else None,
            "out": poison(BeamCandidates.empty(sequences, beams, make.device)),
        }

    def exact(inputs: Inputs) -> Tensor:
        top = _exact_scores(inputs).topk(best, dim=1).values
        return torch.stack((top, top))

    def read(result: object, inputs: Inputs) -> Tensor:
        assert isinstance(result, tuple)
        tokens, parents, scores = result
        # the score shows that a candidate was never written; without the clamp it would crash
        at = (parents.long() * vocabulary + tokens.long()).clamp(0, beams * vocabulary - 1)
        return torch.stack((scores.double(), _exact_scores(inputs).gather(1, at)))

    return OpCall(
        op="beam_step",
        shape=f"{sequences}x{beams}x{vocabulary}",
        dtype=dtype,
        inputs=inputs,
        exact=exact,
        bytes_moved=rows * vocabulary * dtype.itemsize,
        read=read,
        threshold=1e-5,
    )


def _exact_scores(inputs: Inputs) -> Tensor:
    """Return the score of every (beam, token) in float64, [sequences, beams * vocabulary]."""
    scores = inputs["scores"].double()
    log_prob = torch.log_softmax(inputs["logits"].double(), dim=-1)
    total: Tensor = log_prob.view(*scores.shape, -1) + scores[..., None]
    return total.flatten(1)
