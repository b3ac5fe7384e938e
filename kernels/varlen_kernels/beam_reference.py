"""One step of beam search in plain torch: the best continuations of all beams of a sequence.

A sequence with K beams keeps its best 2K continuations: K of them may end it, and K must still be there to go on.
As in the kernel, groups come first: the 2K-th best of the maxima of groups is at most the 2K-th best of all, so only
what reaches it is sorted.
Source: the hierarchical search of Wang et al. 2021 (LightSeq), arXiv:2010.13887, section 3.2, made exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_BEAMS = 64
MAX_VOCABULARY = 300_000

# What stands where there is no candidate; its score is -inf.
NO_TOKEN = -1
NO_PARENT = -1

_LARGEST = torch.finfo(torch.float32).max
# Neighbours in the vocabulary that give one maximum.
_GROUP = 32


class BeamCandidates(NamedTuple):
    """The best 2 · beams continuations of each sequence, best first.

    Attributes:
        tokens: `[sequences, 2 · beams]` int32, NO_TOKEN where there is no candidate.
        parents: `[sequences, 2 · beams]` int32, the beam each continues, NO_PARENT where there is no candidate.
        scores: `[sequences, 2 · beams]` fp32, summed log-probabilities; -inf where there is no candidate.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor

    @classmethod
    def empty(cls, sequences: int, beams: int, device: torch.device) -> "BeamCandidates":
        """Return room for the candidates of `sequences`, not yet filled in."""
        shape = (sequences, 2 * beams)
        return cls(
            tokens=torch.empty(shape, dtype=torch.int32, device=device),
            parents=torch.empty(shape, dtype=torch.int32, device=device),
            scores=torch.empty(shape, dtype=torch.float32, device=device),
        )


def beam_step(
    logits: Tensor,
    scores: Tensor,
    finished: Tensor | None = None,
    *,
    out: BeamCandidates | None = None,
) -> BeamCandidates:
    """Return the best 2 · beams of all (beam, token) of each sequence, by scores + log_softmax(logits) in fp32.

    The order is total, so the answer is the same on every run: the higher score; of equal scores the lower
    beam; in one beam the higher logit, which rounding may have made one score; of equal logits the lower token.
    NaN counts as -inf and +inf as the largest finite number, in logits and in scores. A candidate of score -inf
    is still a candidate.

    Args:
        logits: `[sequences · beams, vocabulary]`; rows may lie further apart than the vocabulary.
        scores: `[sequences, beams]` fp32, the summed log-probability of each beam so far.
        finished: `[sequences]` bool; these have no candidates, and their logits are not read. None means no one.

    Raises:
        ValueError: a shape or dtype is not as above, there are more than MAX_BEAMS beams, or the vocabulary is
            empty or larger than MAX_VOCABULARY.
    """
    check_beams(logits, scores, finished, out)
    sequences, beams = scores.shape
    if out is None:
        out = BeamCandidates.empty(sequences, beams, logits.device)
    out.tokens.fill_(NO_TOKEN)
    out.parents.fill_(NO_PARENT)
    out.scores.fill_(-torch.inf)
    if finished is None:
        going = torch.arange(sequences, device=logits.device)
    else:
        going = finished.logical_not().nonzero().squeeze(1)
        # a copy of what is read
        logits = logits.reshape(sequences, beams, logits.shape[1])[going].flatten(0, 1)
    if len(going) == 0:
        return out

    width = 2 * beams
    logits = _without_nan(logits.float())
    row, token, logit = _best_of_each_row(logits, width)
    peak = _peak(logits)
    log_prob = (logit - peak[row]) - _log_of_sum(logits, peak)[row]
    score = _without_nan(scores[going].float()).flatten()[row] + log_prob

    # rows stand in order, so a stable sort leaves equal scores to the lower beam
    order = score.sort(descending=True, stable=True).indices
    order = order[(row[order] // beams).sort(stable=True).indices]
    place = _places(row[order] // beams, len(going))
    order, place = order[place < width], place[place < width]
    at = going[row[order] // beams], place
    out.tokens[at] = token[order].int()
    out.parents[at] = (row[order] % beams).int()
    out.scores[at] = score[order]
    return out


def check_beams(
    logits: Tensor, scores: Tensor, finished: Tensor | None, out: BeamCandidates | None
) -> None:
    """Check what a caller passed to `beam_step`, in either form.

    Raises:
        ValueError: something is not as `beam_step` says; the message names it.
    """
    if scores.ndim != 2 or scores.dtype != torch.float32:
        raise ValueError(
            f"scores is {list(scores.shape)} {scores.dtype}; it must be [sequences, beams] float32"
        )
    sequences, beams = scores.shape
    if not 1 <= beams <= MAX_BEAMS:
        raise ValueError(f"scores has {beams} beams; allowed: 1 to {MAX_BEAMS}")
    if logits.ndim != 2 or len(logits) != sequences * beams:
        raise ValueError(
            f"logits is {list(logits.shape)}; scores of {sequences} sequences and {beams} beams need"
            f" [{sequences * beams}, vocabulary]"
        )
    if logits.dtype not in {torch.float32, torch.float16, torch.bfloat16}:
        raise ValueError(f"logits is {logits.dtype}; allowed: float32, float16, bfloat16")
    if not 1 <= logits.shape[1] <= MAX_VOCABULARY:
        raise ValueError(
            f"logits has a vocabulary of {logits.shape[1]}; allowed: 1 to {MAX_VOCABULARY}"
        )
    if finished is not None and (finished.shape != (sequences,) or finished.dtype != torch.bool):
        raise ValueError(
            f"finished is {list(finished.shape)} {finished.dtype}; it must be [{sequences}] bool"
        )
    if out is not None:
        _check_out(out, (sequences, 2 * beams))


def _check_out(out: BeamCandidates, shape: tuple[int, int]) -> None:
    for name, dtype in (
        ("tokens", torch.int32),
        ("parents", torch.int32),
        ("scores", torch.float32),
    ):
        tensor = getattr(out, name)
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"out.{name} is {list(tensor.shape)} {tensor.dtype}; it must be {list(shape)} {dtype}"
            )


def _without_nan(x: Tensor) -> Tensor:
    """Return x in which NaN is -inf and +inf the largest finite number."""
    # adding up is a fast way to find out that there is nothing to do
    if x.sum().isfinite():
        return x
    return x.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


def _peak(logits: Tensor) -> Tensor:
    """Return the maximum of each row, 0 for one of -inf alone."""
    peak = logits.amax(1)
    return peak.masked_fill_(peak == -torch.inf, 0.0)


def _log_of_sum(logits: Tensor, peak: Tensor) -> Tensor:
    """Return log Σ exp(logit - peak) of each row, 0 for one of -inf alone."""
    total = (logits - peak[:, None]).exp_().sum(1)
    return total.masked_fill_(total == 0, 1.0).log_()


def _best_of_each_row(logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, token and logit of the best `width` of each row, or of all there are: row by row, best first."""
    row, token, logit = _reaching(logits, width)
    # tokens stand in order, so stable sorts leave equal logits to the lower one
    order = logit.sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]
    order = order[_places(row[order], len(logits)) < width]
    return row[order], token[order], logit[order]


def _reaching(logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, token and logit, in order, of few logits with the best `width` of each row among them."""
    maxima = _group_maxima(logits)
    if maxima.shape[1] > width:
        # as many logits as that reach this floor
        floor = maxima.topk(width, dim=1).values[:, -1]
    else:
        floor = maxima.new_full((len(maxima),), -torch.inf)
    row, group = (maxima >= floor[:, None]).nonzero(as_tuple=True)
    token = group[:, None] * _GROUP + torch.arange(_GROUP, device=logits.device)
    inside = token < logits.shape[1]
    logit = logits[row[:, None], token.where(inside, 0)]
    reaches = inside & (logit >= floor[row, None])
    return row[:, None].expand_as(token)[reaches], token[reaches], logit[reaches]


def _group_maxima(logits: Tensor) -> Tensor:
    """Return the maximum of each group of neighbours, `[rows, groups]`; the last group may be short."""
    groups, rest = divmod(logits.shape[1], _GROUP)
    maxima = logits[:, : groups * _GROUP].view(len(logits), groups, _GROUP).amax(2)
    if rest == 0:
        return maxima
    return torch.cat([maxima, logits[:, -rest:].amax(1, keepdim=True)], dim=1)


def _places(group: Tensor, count: int) -> Tensor:
    """Return the place of each entry inside its group, given the ascending groups of all."""
    sizes = torch.bincount(group, minlength=count)
    starts = sizes.cumsum(0) - sizes
    return torch.arange(len(group), device=group.device) - starts[group]
