"""Cases of the beam step: the best 2K continuations of sequences with K beams."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from varlen_bench.kernels.case import (
    Call,
    Case,
    Compile,
    Inputs,
    Peer,
    Unavailable,
    generator_for,
    random_tensor,
    unwritten,
)
from varlen_bench.kernels.peers import compiled_peer, torch_peer
from varlen_kernels.beam_reference import BeamCandidates

LIGHTSEQ = "lightseq"


def beam_case(sequences: int, beams: int, vocabulary: int, dtype: torch.dtype) -> Case:
    """Return one beam step.

    A result is right if the scores that it reports, and the exact scores of the candidates that it names,
    both are the best there are, in order.
    """
    rows, best = sequences * beams, 2 * beams

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)
        return {
            "logits": 3 * random_tensor((rows, vocabulary), dtype, device, numbers),
            "scores": random_tensor((sequences, beams), torch.float32, device, numbers) - 10,
            "tokens": unwritten((sequences, best), torch.int32, device),
            "parents": unwritten((sequences, best), torch.int32, device),
            "best": unwritten((sequences, best), torch.float32, device),
        }

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        out = BeamCandidates(inputs["tokens"], inputs["parents"], inputs["best"])
        return kernels.beam_step(inputs["logits"], inputs["scores"], out=out)

    def exact(inputs: Inputs) -> Tensor:
        top = _exact_scores(inputs).flatten(1).topk(best, dim=1).values
        return torch.stack((top, top))

    def read(result: object, inputs: Inputs) -> Tensor:
        assert isinstance(result, tuple)
        tokens, parents, scores = result
        # a candidate that was never written is caught by its score, not by a crash
        at = (parents.long() * vocabulary + tokens.long()).clamp(0, beams * vocabulary - 1)
        named = _exact_scores(inputs).flatten(1).gather(1, at)
        return torch.stack((scores.double(), named))

    def plain(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = torch.log_softmax(logits.float(), dim=-1) + scores.view(rows, 1)
        top = total.view(sequences, -1).topk(best, dim=1)
        return top.indices % vocabulary, top.indices // vocabulary, top.values

    def by_rows(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Search each row alone first, so that no log-softmax is written."""
        found = logits.topk(min(best, vocabulary), dim=1)
        offset = scores.view(rows, 1) - logits.float().logsumexp(1, keepdim=True)
        width = found.values.shape[1]
        top = (found.values.float() + offset).view(sequences, -1).topk(best, dim=1)
        return (
            found.indices.view(sequences, -1).gather(1, top.indices),
            top.indices // width,
            top.values,
        )

    names = ("logits", "scores")
    return Case(
        op="beam_step",
        shape=f"{sequences}x{beams}x{vocabulary}",
        dtype=dtype,
        make=make,
        call=call,
        exact=exact,
        bytes_moved=rows * vocabulary * dtype.itemsize,
        peers=(
            torch_peer(plain, *names, read=read),
            torch_peer(by_rows, *names, name="torch-by-rows", read=read),
            Peer(LIGHTSEQ, _build_lightseq, read, no_graph="the host waits for the queue"),
            compiled_peer(plain, *names, read=read),
            compiled_peer(by_rows, *names, name="compile-by-rows", read=read),
        ),
        read=read,
        threshold=1e-5,
    )


def _build_lightseq(_: Compile) -> Call:
    try:
        from varlen_bench.kernels.lightseq_rule import beam_step
    except ImportError as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    return lambda inputs: beam_step(inputs["logits"], inputs["scores"])


def _exact_scores(inputs: Inputs) -> Tensor:
    """Return the score of every (beam, token) in float64, `[sequences, beams, vocabulary]`."""
    scores = inputs["scores"].double()
    log_prob = torch.log_softmax(inputs["logits"].double(), dim=-1)
    return log_prob.view(*scores.shape, -1) + scores[..., None]
