"""One step of beam search in plain torch: the best continuations of each sequence.

A step on K beams returns by default the best 2K continuations: up to K of them may end the sequence, and K others
continue it. Only part of the logits is sorted: of groups of logits, the 2K-th largest maximum is a lower bound for the
2K-th largest logit, so logits below it are dropped.
Source: the hierarchical search of Wang et al. 2021 (LightSeq), arXiv:2010.13887, section 3.2, made exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels.functions import MAX_WIDTH, NO_TOKEN

__all__ = ["beam_step"]

MAX_BEAMS = MAX_WIDTH // 2
MAX_VOCABULARY = 300_000

# Parent where there is no candidate; the score is -inf.
NO_PARENT = -1

_LARGEST = torch.finfo(torch.float32).max
# Adjacent logits per group.
_GROUP_SIZE = 32


class BeamCandidates(NamedTuple):
    """The best continuations of each sequence, best first.

    Attributes:
        tokens: `[sequences, width]` int32; NO_TOKEN where there is no candidate.
        parents: `[sequences, width]` int32, the beam that is continued; NO_PARENT where there is no candidate.
        scores: `[sequences, width]` fp32, sums of log probabilities; -inf where there is no candidate.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor

    @classmethod
    def empty(cls, sequences: int, width: int, device: torch.device) -> "BeamCandidates":
        shape = (sequences, width)
        return cls(
            tokens=torch.empty(shape, dtype=torch.int32, device=device),
            parents=torch.empty(shape, dtype=torch.int32, device=device),
            scores=torch.empty(shape, dtype=torch.float32, device=device),
        )


class BeamEdits(NamedTuple):
    """Changes of log probabilities: penalties and banned tokens.

    The log probability of each edited token is multiplied by a factor. The others are not normalized again.

    Attributes:
        rows: `[edits]` int32, ascending: rows of logits.
        tokens: `[edits]` int32, in the vocabulary; no token twice in a row.
        factors: `[edits]` fp32, above 0. A factor above 1 makes a token less probable, and +inf bans it.
    """

    rows: Tensor
    tokens: Tensor
    factors: Tensor


def beam_step(
    logits: Tensor,
    scores: Tensor,
    finished: Tensor | None = None,
    *,
    width: int | None = None,
    edits: BeamEdits | None = None,
    out: BeamCandidates | None = None,
) -> BeamCandidates:
    """Return the best `width` (beam, token) pairs of each sequence by score.

    The score is scores + log_softmax(logits), in fp32. The order is total, so the result is the same on every run: by
    higher score, then lower beam, then higher logit (rounding may give two logits one score), then lower token. Among
    equal scores, edited tokens come last, by lower beam, then lower token. In logits and scores, NaN counts as -inf and
    +inf as the largest finite number. A pair of score -inf is no candidate: so is a banned token.

    Args:
        logits: `[sequences · beams, vocabulary]`; the row stride may exceed the vocabulary. Logits of edited tokens may
            be overwritten.
        scores: `[sequences, beams]` fp32, the sum of log probabilities of each beam so far.
        finished: `[sequences]` bool: sequences that get no candidates and whose logits are not read. None: no sequence.
        width: candidates per sequence, 1 to MAX_WIDTH. None: 2 · beams.
        edits: factors of log probabilities, applied after log_softmax.

    Raises:
        ValueError: a shape or dtype is not as above, there are more than MAX_BEAMS beams, or the vocabulary is
            empty or larger than MAX_VOCABULARY.
    """
    width = check_beams(logits, scores, finished, width, edits, out)
    sequences, beams = scores.shape
    if out is None:
        out = BeamCandidates.empty(sequences, width, logits.device)
    out.tokens.fill_(NO_TOKEN)
    out.parents.fill_(NO_PARENT)
    out.scores.fill_(-torch.inf)
    if finished is None:
        active = torch.arange(sequences, device=logits.device)
    else:
        active = finished.logical_not().nonzero().squeeze(1)
        # a copy of the rows of active sequences
        logits = logits.reshape(sequences, beams, logits.shape[1])[active].flatten(0, 1)
        edits = None if edits is None else _edits_of(edits, active, finished, beams)
    if len(active) == 0:
        return out

    logits = without_nan(logits.float())
    peak = _peak(logits)
    log_sum = _log_of_sum(logits, peak)
    if edits is None:
        row, token, logit = _best_of_each_row(logits, width)
        log_prob = (logit - peak[row]) - log_sum[row]
    else:
        row, token, log_prob = _best_with_edits(logits, peak, log_sum, edits, width)
    score = without_nan(scores[active].float()).flatten()[row] + log_prob
    possible = score > -torch.inf
    row, token, score = row[possible], token[possible], score[possible]

    # a stable sort keeps the order among equal scores: lower beams first, and edited tokens last
    order = score.sort(descending=True, stable=True).indices
    order = order[(row[order] // beams).sort(stable=True).indices]
    rank = _rank_in_group(row[order] // beams, len(active))
    order, rank = order[rank < width], rank[rank < width]
    at = active[row[order] // beams], rank
    out.tokens[at] = token[order].int()
    out.parents[at] = (row[order] % beams).int()
    out.scores[at] = score[order]
    return out


def check_beams(
    logits: Tensor,
    scores: Tensor,
    finished: Tensor | None,
    width: int | None,
    edits: BeamEdits | None,
    out: BeamCandidates | None,
) -> int:
    """Check the arguments of `beam_step` in any implementation, and return its width.

    Raises:
        ValueError: an argument has a wrong shape or dtype; the message names it.
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
    width = 2 * beams if width is None else width
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width is {width}; allowed: 1 to {MAX_WIDTH}")
    if edits is not None:
        _check_edits(edits)
    if out is not None:
        _check_out(out, (sequences, width))
    return width


def _check_edits(edits: BeamEdits) -> None:
    dtypes = (torch.int32, torch.int32, torch.float32)
    for (name, tensor), dtype in zip(edits._asdict().items(), dtypes, strict=True):
        if tensor.shape != (len(edits.rows),) or tensor.dtype != dtype:
            raise ValueError(
                f"edits.{name} is {list(tensor.shape)} {tensor.dtype};"
                f" it must be [{len(edits.rows)}] {dtype}"
            )


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


def without_nan(x: Tensor) -> Tensor:
    """Return x with NaN replaced by -inf, and +inf by the largest finite number."""
    # a finite sum shows fast that x has neither
    if x.sum().isfinite():
        return x
    return x.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


def _edits_of(edits: BeamEdits, active: Tensor, finished: Tensor, beams: int) -> BeamEdits:
    """Return the edits of active sequences, whose rows are counted without the others."""
    sequence = edits.rows.long() // beams
    kept = ~finished[sequence]
    index = torch.zeros_like(finished, dtype=torch.long)
    index[active] = torch.arange(len(active), device=active.device)
    rows = index[sequence] * beams + edits.rows % beams
    return BeamEdits(rows[kept].int(), edits.tokens[kept], edits.factors[kept])


def _best_with_edits(
    logits: Tensor, peak: Tensor, log_sum: Tensor, edits: BeamEdits, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, token and log probability of the best tokens.

    These are the best `width` tokens of each row without an edit, then all edited tokens, each by row.
    """
    at = edits.rows.long(), edits.tokens.long()
    # edited tokens in ascending order, so that a stable sort keeps it
    order = (at[0] * logits.shape[1] + at[1]).argsort()
    at, factor = (at[0][order], at[1][order]), edits.factors[order]
    edited = (logits[at] - peak[at[0]]) - log_sum[at[0]]
    edited = (edited * factor).masked_fill_(factor == torch.inf, -torch.inf)

    # a score of -inf is no candidate
    unedited = logits.index_put(at, logits.new_tensor(-torch.inf))
    row, token, logit = _best_of_each_row(unedited, width)
    log_prob = (logit - peak[row]) - log_sum[row]
    return torch.cat((row, at[0])), torch.cat((token, at[1])), torch.cat((log_prob, edited))


def _peak(logits: Tensor) -> Tensor:
    """Return the maximum of each row; 0 for a row of only -inf."""
    peak = logits.amax(1)
    return peak.masked_fill_(peak == -torch.inf, 0.0)


def _log_of_sum(logits: Tensor, peak: Tensor) -> Tensor:
    """Return log Σ exp(logit - peak) of each row, 0 for only -inf."""
    total = (logits - peak[:, None]).exp_().sum(1)
    return total.masked_fill_(total == 0, 1.0).log_()


def _best_of_each_row(logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, token and logit of the best `width` logits of each row.

    They are sorted by row, then best first. A row with fewer logits has all of them.
    """
    row, token, logit = _above_floor(logits, width)
    # tokens ascend, so stable sorts put the lower token first among equal logits
    order = logit.sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]
    order = order[_rank_in_group(row[order], len(logits)) < width]
    return row[order], token[order], logit[order]


def _above_floor(logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, token and logit of the logits that may be a row's best `width`.

    They are sorted by row, then token.
    """
    maxima = _group_maxima(logits)
    if maxima.shape[1] > width:
        # at least `width` logits of the row reach this floor
        floor = maxima.topk(width, dim=1).values[:, -1]
    else:
        floor = maxima.new_full((len(maxima),), -torch.inf)
    row, group = (maxima >= floor[:, None]).nonzero(as_tuple=True)
    token = group[:, None] * _GROUP_SIZE + torch.arange(_GROUP_SIZE, device=logits.device)
    inside = token < logits.shape[1]
    logit = logits[row[:, None], token.where(inside, 0)]
    above_floor = inside & (logit >= floor[row, None])
    return row[:, None].expand_as(token)[above_floor], token[above_floor], logit[above_floor]


def _group_maxima(logits: Tensor) -> Tensor:
    """Return the maximum of each group of adjacent logits, `[rows, groups]`."""
    groups, rest = divmod(logits.shape[1], _GROUP_SIZE)
    maxima = logits[:, : groups * _GROUP_SIZE].view(len(logits), groups, _GROUP_SIZE).amax(2)
    if rest == 0:
        return maxima
    return torch.cat([maxima, logits[:, -rest:].amax(1, keepdim=True)], dim=1)


def _rank_in_group(group: Tensor, count: int) -> Tensor:
    """Return the index of each entry in its group, for ascending group numbers."""
    sizes = torch.bincount(group, minlength=count)
    starts = sizes.cumsum(0) - sizes
    return torch.arange(len(group), device=group.device) - starts[group]
