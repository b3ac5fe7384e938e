"""Calls of the ops that choose tokens: a beam step, and sampling.

Several choices may be right, so the exact result is a property of the choice, in float64.
"""

from typing import Any

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, Make, OpCall, Tensors, flags, poison, unwritten
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

    def changes(make: Tensors) -> BeamEdits:
        edited = [token * (vocabulary // edits) for token in range(edits)] * rows
        return BeamEdits(
            make.ints([row for row in range(rows) for _ in range(edits)]),
            make.ints(edited),
            make.random(rows * edits, dtype=torch.float32).abs_(),
        )

    return OpCall(
        "beam_step",
        f"{sequences}x{beams}x{vocabulary}"
        + (f" width {width}" if width else "")
        + (f" edits {edits}" if edits else ""),
        dtype,
        {
            "logits": lambda make: make.random(rows, vocabulary).mul_(3),
            "scores": lambda make: make.random(sequences, beams, dtype=torch.float32) - 10,
            "finished": flags(sequences, value=False) if has_finished else None,
            "edits": changes if edits else None,
        },
        lambda make: poison(BeamCandidates.empty(sequences, best, make.device)),
        {"width": width},
        formula=_best_scores,
        read=_scores_of_candidates,
        threshold=1e-5,
    )


def _best_scores(inputs: Inputs) -> Tensor:
    top = _scores(inputs).topk(inputs["out"].scores.shape[1], dim=1).values
    return torch.stack((top, top))


def _scores_of_candidates(result: Any, inputs: Inputs) -> Tensor:
    """Return the scores of a result, and the exact scores of its candidates."""
    tokens, parents, scores = result
    if inputs["edits"] is not None:
        # the logits are overwritten
        return torch.stack((scores.double(), scores.double()))
    exact = _scores(inputs)
    index = parents.long() * inputs["logits"].shape[1] + tokens.long()
    # the poison of an unwritten candidate is no valid index; its score already shows the error
    exact = exact.gather(1, index.clamp(0, exact.shape[1] - 1))
    return torch.stack((scores.double(), exact))


def _scores(inputs: Inputs) -> Tensor:
    """Return the score of each continuation, `[sequences, beams · vocabulary]`."""
    log_prob = torch.log_softmax(inputs["logits"].double(), dim=-1)
    if (edits := inputs["edits"]) is not None:
        log_prob[edits.rows.long(), edits.tokens.long()] *= edits.factors
    scores: Tensor = inputs["scores"].double()
    return (log_prob.view(*scores.shape, -1) + scores[..., None]).flatten(1)


def sample_tokens(
    rows: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> OpCall:
    """Return the sampling of one token a row.

    A result is right if each uniform number is inside its token's part of the sum of probabilities.

    Args:
        dtype: dtype of the model; logits are fp32.
        temperature, top_k, top_p, min_p: settings of every row.
    """

    def filled(value: float) -> Make:
        return lambda make: torch.full((rows,), value, device=make.device)

    return OpCall(
        "sample_tokens",
        f"{rows}x{vocabulary}",
        dtype,
        {
            "logits": lambda make: make.random(rows, vocabulary, dtype=torch.float32).mul_(3),
            "temperature": filled(temperature),
            "top_p": filled(top_p),
            "min_p": filled(min_p),
            "top_k": [top_k] * rows,
            "uniform": lambda make: torch.linspace(
                0.01, 0.99, rows, dtype=torch.float64, device=make.device
            ),
        },
        unwritten(torch.int32, rows),
        formula=lambda inputs: inputs["uniform"],
        read=_uniform_of_tokens,
        threshold=1e-5,
    )


def _uniform_of_tokens(result: Any, inputs: Inputs) -> Tensor:
    """Return each uniform number, moved into the part of the token that was drawn."""
    probability = _kept_probabilities(inputs)
    after = probability.cumsum(1)
    # the poison of an unwritten token is no valid index
    token = result.long().clamp(0, after.shape[1] - 1)[:, None]
    uniform: Tensor = inputs["uniform"][:, None]
    before = (after - probability).gather(1, token)
    return uniform.clamp(before, after.gather(1, token)).squeeze(1)


def _kept_probabilities(inputs: Inputs) -> Tensor:
    """Return the probability of each token after top-k, top-p and min-p, `[rows, vocabulary]`."""
    logits: Tensor = inputs["logits"].double()
    temperature, top_k, top_p, min_p = (
        inputs[name][:, None].double() for name in ("temperature", "top_k", "top_p", "min_p")
    )
    order = logits.sort(dim=1, descending=True, stable=True).indices
    kept = (logits / temperature.clamp_min(1e-9)).softmax(1).gather(1, order)
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = top_k.where(top_k > 0, logits.shape[1]).where(temperature > 0, 1)
    kept = kept.masked_fill(rank >= limit, 0.0)
    kept /= kept.sum(1, keepdim=True)
    better = kept.cumsum(1) - kept
    kept = kept.masked_fill((better >= top_p) & (rank > 0), 0.0)
    kept = kept.masked_fill(kept < min_p * kept[:, :1], 0.0)
    kept = torch.zeros_like(kept).scatter_(1, order, kept)
    return kept / kept.sum(1, keepdim=True)
