"""Biases, bans and penalties of single logits on a CPU, compiled by numba.

Source: the specification is `reference.logit_edits`.
"""

import numpy as np

from varlen_kernels.cpu.native.native import inlined, inlined_body
from varlen_kernels.reference.beam import NO_TOKEN
from varlen_kernels.reference.logit_edits import KEPT, NO_BIAS, NO_SLOT, UNSEEN

_LOWEST, _NO_BIAS = np.float32(-np.inf), np.float32(NO_BIAS)


@inlined
def _edited(logit, count, bias, penalties):
    """Return a logit with its bias and its penalties."""
    biased = logit + bias
    if count == UNSEEN:
        return biased
    penalized = biased / penalties[0] if biased > 0 else biased * penalties[0]
    penalized -= penalties[2] * np.float32(count)
    return penalized - penalties[1] * np.float32(count > 0)


@inlined_body
def edit_logits(
    first,
    last,
    token_ids,  # [tokens]
    logit_rows,  # [logit rows]
    rows,  # [edited rows, EDIT_COLUMNS]
    penalties,  # [edited rows, 3]
    begun_tokens,  # [entries of the host], and so on
    begun_counts,
    begun_biases,
    logits,  # [logit rows, vocabulary]
    tokens,  # [slots, entries], and so on
    counts,
    biases,
    sizes,  # [slots]
):
    """Edit the logits of some sequences."""
    for edited in range(first, last):
        row, slot, num_banned = rows[edited, 0], rows[edited, 1], rows[edited, 3]
        begin, end, own = rows[edited, 4], rows[edited, 5], penalties[edited]
        added = token_ids[logit_rows[row]] if rows[edited, 2] else np.int32(NO_TOKEN)
        size = sizes[slot] if end == KEPT else end - begin
        is_listed = False
        for entry in range(size):
            if end == KEPT:
                token, count, bias = (
                    tokens[slot, entry],
                    counts[slot, entry],
                    biases[slot, entry],
                )
            else:
                at = begin + entry
                token, count, bias = begun_tokens[at], begun_counts[at], begun_biases[at]
            if token == added:
                count, is_listed = np.int32(max(count, 0) + 1), True
            if slot != NO_SLOT:
                tokens[slot, entry], counts[slot, entry] = token, count
                biases[slot, entry] = bias
            is_banned = entry < num_banned
            logits[row, token] = (
                _LOWEST if is_banned else _edited(logits[row, token], count, bias, own)
            )
        if added != NO_TOKEN and not is_listed:
            if slot != NO_SLOT:
                tokens[slot, size], counts[slot, size], biases[slot, size] = added, 1, _NO_BIAS
            logits[row, added] = _edited(logits[row, added], np.int32(1), _NO_BIAS, own)
            size += 1
        if slot != NO_SLOT:
            sizes[slot] = size
    return 0
