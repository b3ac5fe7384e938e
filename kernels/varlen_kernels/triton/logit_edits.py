"""Biases, bans and penalties of single logits, in one kernel.

One program has one sequence and reads its list once. The program that reads an entry is the only one that writes it
and its logit, so nothing has to wait.
Source: the specification is `reference.logit_edits`.
"""

from struct import pack, unpack

import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.functions import NO_TOKEN
from varlen_kernels.reference import logit_edits as reference
from varlen_kernels.reference.logit_edits import EditLists, EditState, check_edits
from varlen_kernels.triton.checks import check_contiguous, check_row_layout

_EDIT_COLUMNS = tl.constexpr(reference.EDIT_COLUMNS)
_KEPT, _UNSEEN = tl.constexpr(reference.KEPT), tl.constexpr(reference.UNSEEN)
# By its bits, since it is -0.0: Triton 3.6 takes a constant that equals 0 for +0.0.
_NO_BIAS_BITS = tl.constexpr(unpack("i", pack("f", reference.NO_BIAS))[0])
_NO_TOKEN = tl.constexpr(NO_TOKEN)
# Entries that a program reads at once.
_BLOCK = 512


@triton.jit
def _edited(logit, count, bias, is_banned, repetition, presence, frequency):
    biased = logit + bias
    number = tl.maximum(count, 0).to(tl.float32)
    penalized = tl.where(biased > 0, tl.math.div_rn(biased, repetition), biased * repetition)
    penalized = penalized - frequency * number
    penalized = penalized - presence * (number > 0).to(tl.float32)
    edited = tl.where(count == _UNSEEN, biased, penalized)
    return tl.where(is_banned, float("-inf"), edited)


@triton.jit
def _load_either(begun_ptr, kept_ptr, is_begun, is_kept):
    """Return numbers of a list that begins or is kept; 0 beyond both."""
    begun = tl.load(begun_ptr, mask=is_begun, other=0)
    return tl.where(is_begun, begun, tl.load(kept_ptr, mask=is_kept, other=0))


@triton.jit
def _edit_logits_kernel(
    logits_ptr,  # [logit rows, vocabulary]
    token_ids_ptr,  # [tokens]
    logit_rows_ptr,  # [logit rows]
    rows_ptr,  # [edited rows, EDIT_COLUMNS]
    penalties_ptr,  # [edited rows, 3]
    begun_tokens_ptr,  # [entries of the host], and so on
    begun_counts_ptr,
    begun_biases_ptr,
    tokens_ptr,  # [slots, ENTRIES], and so on
    counts_ptr,
    biases_ptr,
    sizes_ptr,  # [slots]
    STRIDE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows_ptr += tl.program_id(0) * _EDIT_COLUMNS
    penalties_ptr += tl.program_id(0) * 3
    row, slot = tl.load(rows_ptr), tl.load(rows_ptr + 1)
    is_added, num_banned = tl.load(rows_ptr + 2) != 0, tl.load(rows_ptr + 3)
    begin, end = tl.load(rows_ptr + 4), tl.load(rows_ptr + 5)
    repetition, presence = tl.load(penalties_ptr), tl.load(penalties_ptr + 1)
    frequency = tl.load(penalties_ptr + 2)
    has_slot = slot >= 0
    slot = tl.maximum(slot, 0)
    # a list of the host is empty, or the one in the slot is
    begun_size = tl.where(end == _KEPT, 0, end - begin)
    kept_size = tl.load(sizes_ptr + slot, mask=end == _KEPT, other=0)
    size = begun_size + kept_size
    # without a slot, nothing is stored
    stored_size = tl.where(has_slot, size, 0)
    added = tl.load(
        token_ids_ptr + tl.load(logit_rows_ptr + row, mask=is_added, other=0),
        mask=is_added,
        other=_NO_TOKEN,
    )
    # int64: rows * STRIDE and slots * ENTRIES may pass 2**31
    logits_ptr += row.to(tl.int64) * STRIDE
    first = slot.to(tl.int64) * ENTRIES

    is_listed = tl.zeros([], tl.int32)
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < size
        from_begun, from_kept, is_stored = (
            entry < begun_size,
            entry < kept_size,
            entry < stored_size,
        )
        theirs, own = begin + entry, first + entry
        token = _load_either(begun_tokens_ptr + theirs, tokens_ptr + own, from_begun, from_kept)
        count = _load_either(begun_counts_ptr + theirs, counts_ptr + own, from_begun, from_kept)
        bias = _load_either(begun_biases_ptr + theirs, biases_ptr + own, from_begun, from_kept)
        is_same = inside & (token == added)
        is_listed = tl.maximum(is_listed, tl.max(is_same.to(tl.int32), axis=0))
        count = tl.where(is_same, tl.maximum(count, 0) + 1, count)
        tl.store(counts_ptr + own, count, mask=(from_begun | is_same) & is_stored)
        tl.store(tokens_ptr + own, token, mask=from_begun & is_stored)
        tl.store(biases_ptr + own, bias, mask=from_begun & is_stored)
        logit = tl.load(logits_ptr + token, mask=inside, other=0.0)
        is_banned = entry < num_banned
        edited = _edited(logit, count, bias, is_banned, repetition, presence, frequency)
        tl.store(logits_ptr + token, edited, mask=inside)

    no_bias = tl.full([], _NO_BIAS_BITS, tl.int32).to(tl.float32, bitcast=True)
    is_new = is_added & (is_listed == 0)
    keeps_new = is_new & has_slot
    tl.store(tokens_ptr + first + size, added, mask=keeps_new)
    tl.store(counts_ptr + first + size, 1, mask=keeps_new)
    tl.store(biases_ptr + first + size, no_bias, mask=keeps_new)
    logit = tl.load(logits_ptr + added, mask=is_new, other=0.0)
    edited = _edited(logit, 1, no_bias, False, repetition, presence, frequency)
    tl.store(logits_ptr + added, edited, mask=is_new)
    tl.store(sizes_ptr + slot, size + is_new.to(tl.int32), mask=has_slot)


def edit_logits(
    logits: Tensor,
    token_ids: Tensor,
    logit_rows: Tensor,
    rows: Tensor,
    penalties: Tensor,
    begun: EditLists,
    state: EditState,
) -> None:
    """Change the logits of the tokens of some sequences' lists, see `reference.edit_logits`.

    Raises:
        ValueError: as `reference.edit_logits`; or rows of logits, or another tensor, are not contiguous.
    """
    check_edits(logits, rows, penalties, begun, state)
    check_row_layout(logits=logits)
    check_contiguous(token_ids=token_ids, logit_rows=logit_rows, rows=rows, penalties=penalties)
    check_contiguous(**begun._asdict(), **{f"state.{k}": v for k, v in state._asdict().items()})
    if len(rows) == 0:
        return
    _edit_logits_kernel[(len(rows),)](
        logits,
        token_ids,
        logit_rows,
        rows,
        penalties,
        *begun,
        *state,
        STRIDE=logits.stride(0),
        ENTRIES=state.tokens.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
        # the reference rounds a product before it adds
        enable_fp_fusion=False,
    )
