"""Random candidates of a step of beam search, drawn without replacement.

Limits match Hugging Face's `generate`: they apply to each row, after the edits and
before the score of its beam is added.
"""

import numpy as np
import numpy.typing as npt

from varlen.decoding.search.beam_group import Candidate
from varlen.decoding.search.token_edits import TokenEdits
from varlen.request.generation import GenerationOptions
from varlen.request.request import Float32Array

_Scores = npt.NDArray[np.float64]


def edited(logprobs: Float32Array, edits: TokenEdits | None) -> _Scores:
    """Return log probabilities with their edits, `[rows, vocabulary]` fp64."""
    scores = logprobs.astype(np.float64)
    if edits is not None:
        is_banned = np.isinf(edits.factors)
        # log probability 0 times infinity is no number
        scores[edits.rows, edits.tokens] *= np.where(is_banned, 1, edits.factors)
        scores[edits.rows[is_banned], edits.tokens[is_banned]] = -np.inf
    return scores


def limited(scores: _Scores, options: GenerationOptions, *, keep: int) -> _Scores:
    """Return the scores divided by the temperature; -inf beyond top-k, top-p and min-p.

    Args:
        scores: `[rows, vocabulary]` fp64.
        keep: smallest number of tokens that the limits leave.
    """
    scores = scores / options.temperature
    size = scores.shape[1]
    keep = min(keep, size)
    if 0 < options.top_k < size:
        rank = size - max(options.top_k, keep)
        lowest = np.partition(scores, rank, axis=1)[:, rank, None]
        scores = np.where(scores < lowest, -np.inf, scores)
    if options.top_p == 1 and options.min_p == 0:
        return scores

    order = np.argsort(scores, axis=1, kind="stable")
    ascending = np.take_along_axis(scores, order, axis=1)
    weights = _weights(ascending, ascending[:, -1:])
    if options.top_p < 1:
        shares = np.cumsum(weights, axis=1) / np.sum(weights, axis=1, keepdims=True)
        is_excluded = shares <= 1 - options.top_p
        is_excluded[:, size - keep :] = False
        weights[is_excluded] = 0
    # the largest weight is 1
    is_excluded = (weights == 0) | (weights < options.min_p)
    is_excluded[:, size - keep :] = False
    ascending[is_excluded] = -np.inf
    np.put_along_axis(scores, order, ascending, axis=1)
    return scores


def normalized(scores: _Scores) -> _Scores:
    """Return the scores of each row minus the log of the sum of their exponentials."""
    peaks = scores.max(axis=1, keepdims=True)
    sums = _weights(scores, peaks).sum(axis=1, keepdims=True)
    # a row without tokens stays as it is
    sums[sums == 0] = 1
    logs: _Scores = np.where(np.isneginf(peaks), 0, peaks) + np.log(sums)
    return scores - logs


def draw(scores: _Scores, uniform: npt.NDArray[np.float64], count: int) -> list[Candidate]:
    """Return distinct entries, in the order in which they are drawn.

    Each one is drawn from those that are left, with a probability proportional to the exponential of its score: the
    entries with the largest sums of score and Gumbel noise are such draws (Vieira 2014, "Gumbel-max trick and weighted
    reservoir sampling").

    Args:
        scores: `[rows, vocabulary]` fp64.
        uniform: `[rows * vocabulary]`, random numbers from 0 to below 1.
        count: number of entries; fewer are drawn if there are fewer above -inf.
    """
    # exponential waiting times, never 0, and their negative logarithms
    noise = -np.log(np.maximum(-np.log1p(-uniform), 2.0**-54))
    flat = scores.ravel()
    keys = flat + noise
    count = min(count, int(np.isfinite(flat).sum()))
    if not count:
        return []
    best = np.argpartition(-keys, count - 1)[:count]
    best = best[np.argsort(-keys[best], kind="stable")]
    rows, tokens = np.divmod(best, scores.shape[1])
    return list(zip(flat[best].tolist(), rows.tolist(), tokens.tolist(), strict=True))


def _weights(scores: _Scores, peak: _Scores | float) -> _Scores:
    """Return exp(scores - peak); 0 where all scores are -inf."""
    weights: _Scores = np.exp(scores - np.where(np.equal(peak, -np.inf), 0, peak))
    return weights
