"""LightSeq's selection of beam candidates, a peer of `beam_step`.

A new implementation of Wang et al. 2021, arXiv:2010.13887, section 3.2. A row is split into one group per candidate.
The smallest maximum of the groups is a bound, and at least one logit per group reaches it. All logits that reach the
bound are appended to one queue, which is then sorted. One program reads a row three times and appends with an atomic
counter; the host waits for the length of the queue.
Two things differ from LightSeq. 2K candidates are kept instead of K, as in `beam_step`. Sort keys are integers that
contain the sequence; LightSeq adds an offset to the scores, which costs precision.
"""

# ruff: noqa: N803  # constants of a kernel are in capitals
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.beam import BeamCandidates
from varlen_kernels.triton.beam_keys import key_of

_BLOCK = 4096
_WARPS = 16
# Neighbouring logits that belong to one group.
_STRIPE = 32


@triton.jit
def _rough_top_kernel(
    logits_ptr,  # [rows, VOCABULARY]
    scores_ptr,  # [rows]
    keys_ptr,  # [rows * VOCABULARY] int64: sequence in descending order, then score
    places_ptr,  # [rows * VOCABULARY] int64: row * VOCABULARY + token
    counts_ptr,  # [1 + sequences] int32: length of the queue, and entries per sequence
    sequences,
    VOCABULARY: tl.constexpr,
    BEAMS: tl.constexpr,
    GROUPS: tl.constexpr,
    STRIPE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,  # power of two >= GROUPS
    BLOCK: tl.constexpr,
):
    """Append the logits of one row that reach the bound to the queue."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * VOCABULARY
    group = tl.arange(0, BLOCK_GROUPS)
    maxima = tl.where(group < GROUPS, float("-inf"), float("inf"))
    for begin in range(0, VOCABULARY, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + token, mask=token < VOCABULARY, other=float("-inf"))
        stripes = tl.max(tl.reshape(x.to(tl.float32), [BLOCK // STRIPE, STRIPE]), axis=1)
        owner = (begin // STRIPE + tl.arange(0, BLOCK // STRIPE)) % GROUPS
        own = tl.where(owner[:, None] == group[None, :], stripes[:, None], float("-inf"))
        maxima = tl.maximum(maxima, tl.max(own, axis=0))
    bound = tl.min(maxima, axis=0)
    peak = tl.max(tl.where(group < GROUPS, maxima, float("-inf")), axis=0)

    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, VOCABULARY, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + token, mask=token < VOCABULARY, other=float("-inf"))
        total += tl.exp(x.to(tl.float32) - peak)
    log_total = tl.log(tl.sum(total, axis=0))

    running = tl.load(scores_ptr + row)
    sequence = row // BEAMS
    for begin in range(0, VOCABULARY, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + token, mask=token < VOCABULARY, other=float("-inf"))
        x = x.to(tl.float32)
        reaches = (x >= bound) & (token < VOCABULARY)
        count = tl.sum(reaches.to(tl.int32), axis=0)
        if count > 0:
            start = tl.atomic_add(counts_ptr, count)
            tl.atomic_add(counts_ptr + 1 + sequence, count)
            at = start + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
            score = ((x - peak) - log_total) + running
            key = ((sequences - sequence) << 32) + key_of(score).to(tl.int64)
            tl.store(keys_ptr + at, key, mask=reaches)
            tl.store(places_ptr + at, row * VOCABULARY + token, mask=reaches)


def beam_step(logits: Tensor, scores: Tensor) -> BeamCandidates:
    """Return the best 2 · beams candidates of each sequence; ties are in any order.

    Args:
        logits: `[sequences · beams, vocabulary]`, contiguous, finite.
        scores: `[sequences, beams]` fp32, contiguous, finite.

    Raises:
        ValueError: the vocabulary is too small to be split into groups.
    """
    sequences, beams = scores.shape
    rows, vocabulary = logits.shape
    width = 2 * beams
    if vocabulary < width * _STRIPE:
        raise ValueError(f"vocabulary is {vocabulary}; it must be at least {width * _STRIPE}")
    # the queue has room for every logit
    keys, places = torch.empty(2, rows * vocabulary, dtype=torch.int64, device=logits.device)
    counts = torch.zeros(1 + sequences, dtype=torch.int32, device=logits.device)
    _rough_top_kernel[(rows,)](
        logits,
        scores,
        keys,
        places,
        counts,
        sequences,
        VOCABULARY=vocabulary,
        BEAMS=beams,
        GROUPS=width,
        STRIPE=_STRIPE,
        BLOCK_GROUPS=triton.next_power_of_2(width),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    # waits for the device
    queued = int(counts[0])
    ordered, order = keys[:queued].sort(descending=True)
    starts = counts[1:].cumsum(0) - counts[1:]
    best = starts[:, None] + torch.arange(width, device=logits.device)
    winners = places[order[best]]
    return BeamCandidates(
        tokens=(winners % vocabulary).int(),
        parents=(winners // vocabulary % beams).int(),
        scores=_scores_of(ordered[best]),
    )


def _scores_of(keys: Tensor) -> Tensor:
    """Return the fp32 scores in the low halves of the keys, see `beam_keys.key_of`."""
    low = keys.int()
    return (low ^ ((low >> 31) & 0x7FFFFFFF)).view(torch.float32)
