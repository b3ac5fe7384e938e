"""Products with a vocabulary, whose logits are reduced slice by slice.

The logits of all tokens would be the largest intermediate by far: 500 MB for 4,096 tokens and 30,522 terms. A slice of
them is as large as the output of a feed-forward layer.
Source: Formal et al. 2021, arXiv:2107.05720 and arXiv:2109.10086 (weights of terms, SPLADE).
"""

from collections.abc import Iterator
from itertools import groupby, pairwise

import torch
from torch import Tensor

from varlen_kernels import TermPooling

__all__ = ["term_weights", "top_terms"]

# Terms of the vocabulary whose logits exist at a time.
SLICE_TERMS = 2048
# Rows whose logits exist at a time in `top_terms`.
_SLICE_ROWS = 256


def term_weights(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    mode: TermPooling,
    logs: int = 1,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each term of a vocabulary for each sequence, `[batch, terms]` fp32.

    It is the maximum or the sum over the sequence's tokens of log(1 + max(logit, 0)), where the logits of a token are
    x @ weight + bias. It is 0 for an empty sequence.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden, terms]`, also a transposed table of embeddings.
        bias: `[terms]`.
        cu_seqlens: `[batch + 1]` int32.
        mode: maximum or sum.
        logs: number of times that log(1 + ...) is applied.
        out: the weights, and `[tokens, min(terms, SLICE_TERMS)]` in the dtype of x, which is overwritten.

    Returns:
        `out`, whose second tensor means nothing.
    """
    weights, scratch = out or new_outputs(x, weight, cu_seqlens)
    weights.zero_()
    bounds = cu_seqlens.tolist()
    for terms, logits in logit_slices(x, weight, bias, scratch):
        if mode == "sum":
            log1p_relu_(logits, logs)
        for first, count, length in _runs_of_equal_length(bounds):
            rows = logits[bounds[first] : bounds[first] + count * length]
            into = weights[first : first + count, terms]
            by_sequence = rows.view(count, length, -1)
            if mode == "sum":
                torch.sum(by_sequence, 1, dtype=into.dtype, out=into)
            else:
                into.copy_(by_sequence.amax(1))
    if mode == "max":
        log1p_relu_(weights, logs)
    return weights, scratch


def top_terms(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    count: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return the most likely terms of each row and their probabilities, `[rows, 2, count]` fp32.

    First the numbers of the terms, which fp32 holds exactly, the most likely first; then their probabilities: the
    softmax over all terms of x @ weight + bias.

    Args:
        x: `[rows, hidden]`.
        weight: `[hidden, terms]`, also a transposed table of embeddings.
        bias: `[terms]`.
        count: number of weights to keep, at most the number of terms.
    """
    if out is None:
        out = x.new_empty(len(x), 2, count, dtype=torch.float32)
    scratch = x.new_empty(min(len(x), _SLICE_ROWS), min(weight.shape[1], SLICE_TERMS))
    for begin in range(0, len(x), _SLICE_ROWS):
        rows = x[begin : begin + _SLICE_ROWS]
        logits, terms, peak, total = _top_logits(rows, weight, bias, count, scratch[: len(rows)])
        # fp64: exp magnifies the rounding of a large difference
        weights = (logits.double() - peak[:, None]).exp_()
        out[begin : begin + len(rows), 0] = terms
        out[begin : begin + len(rows), 1] = weights / total[:, None]
    return out


def _top_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, count: int, scratch: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the largest logits of each row, with what a sum of exponentials needs.

    Returns:
        The logits, their terms, the largest of all, and the sum of exp(logit - largest).
    """
    best = x.new_empty(len(x), 0, dtype=torch.float32)
    terms = x.new_empty(len(x), 0, dtype=torch.int64)
    # not -inf, whose difference to itself is NaN
    peak = x.new_full((len(x),), torch.finfo(torch.float32).min, dtype=torch.float32)
    total = x.new_zeros(len(x), dtype=torch.float64)
    for part, narrow in logit_slices(x, weight, bias, scratch):
        logits = narrow.float()
        before, peak = peak, torch.maximum(peak, logits.amax(1))
        total *= (before.double() - peak).exp_()
        total += (logits - peak[:, None]).exp_().sum(1, dtype=torch.float64)
        values, places = logits.topk(min(count, logits.shape[1]), dim=1)
        best, terms = torch.cat((best, values), 1), torch.cat((terms, places + part.start), 1)
        best, chosen = best.topk(min(count, best.shape[1]), dim=1)
        terms = terms.gather(1, chosen)
    return best, terms, peak, total


def new_outputs(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return new tensors for the results of `term_weights`."""
    terms = weight.shape[1]
    weights = x.new_empty(len(cu_seqlens) - 1, terms, dtype=torch.float32)
    return weights, x.new_empty(len(x), min(terms, SLICE_TERMS))


def logit_slices(
    x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the terms with the logits of all tokens, which overwrite earlier ones.

    Args:
        x, weight, bias, scratch: see `term_weights`.
    """
    terms = weight.shape[1]
    for begin in range(0, terms, SLICE_TERMS):
        part = slice(begin, min(begin + SLICE_TERMS, terms))
        logits = scratch[:, : part.stop - begin]
        if bias is None:
            torch.mm(x, weight[:, part], out=logits)
        else:
            torch.addmm(bias[part], x, weight[:, part], out=logits)
        yield part, logits


def log1p_relu_(x: Tensor, logs: int) -> Tensor:
    """Replace each element by log(1 + max(x, 0)), the logarithm applied `logs` times; return the tensor."""
    x.clamp_min_(0)
    for _ in range(logs):
        x.log1p_()
    return x


def _runs_of_equal_length(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first sequence, sequences, length) of adjacent sequences of equal length, skipping empty ones."""
    lengths = [end - begin for begin, end in pairwise(bounds)]
    first = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        if length:
            yield first, count, length
        first += count
