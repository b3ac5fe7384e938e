"""Calls of the step of beam search, at the vocabularies of real models and at the limits."""

from collections.abc import Callable

import torch

from varlen_bench.ops.call import Call
from varlen_kernels.beam import beam_step


def _call(sequences: int, beams: int, vocabulary: int) -> Callable[[torch.dtype], object]:
    def run(dtype: torch.dtype) -> object:
        logits = torch.empty(sequences * beams, vocabulary, dtype=dtype)
        scores = torch.empty(sequences, beams)
        return beam_step(logits, scores, torch.zeros(sequences, dtype=torch.bool))

    return run


_HALF = (torch.float16,)
_BOTH = (torch.float32, torch.float16)

# The loads that look into a group again are narrow, and so are most of the second launch.
CALLS = [
    Call("beam_step-4x32000", _call(8, 4, 32_000)),
    Call("beam_step-4x32000-128", _call(128, 4, 32_000), dtypes=_HALF),
    Call("beam_step-4x50257", _call(8, 4, 50_257), dtypes=_BOTH),
    Call("beam_step-4x250000", _call(8, 4, 250_000), dtypes=_BOTH),
    Call("beam_step-5x300000", _call(1, 5, 300_000), dtypes=_HALF),
    Call("beam_step-64x32000", _call(2, 64, 32_000), dtypes=_HALF),
    Call("beam_step-64x300000", _call(1, 64, 300_000), dtypes=_BOTH),
]
