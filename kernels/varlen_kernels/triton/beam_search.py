"""Steps of searches apart from the model: beams before it, choices after it.

One program of one warp has one search, and one lane has one beam; what depends on pairs of beams compares all of them.
Nothing waits for the host, so steps can follow each other. Source: the specification is `reference.beam_search`.
"""

import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels import functions
from varlen_kernels.reference import beam_search as reference
from varlen_kernels.reference.beam import BeamCandidates
from varlen_kernels.reference.beam_search import SearchResults, SearchState
from varlen_kernels.triton.beam_keys import NO_INDEX, NO_KEY, key_of, value_of
from varlen_kernels.triton.checks import check_contiguous
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels

_NOT_GIVEN = tl.constexpr(functions.NOT_GIVEN)
_FOLLOW_COLUMNS = tl.constexpr(functions.FOLLOW_COLUMNS)
# Blocks of a table that a program reads at once.
_BLOCK_COLUMNS = 16


@triton.jit
def _copies(
    parent,  # [BLOCK_BEAMS]
    beam,  # [BLOCK_BEAMS]
    inside,  # [BLOCK_BEAMS]
):
    """Return which beams take the block of another one, and that one.

    A beam does if one before it continues the same beam. It takes the block of a beam that none continues, in order.
    """
    other = beam[None, :]
    is_before = other < beam[:, None]
    is_same = (parent[:, None] == parent[None, :]) & inside[None, :]
    is_copy = tl.where(inside, tl.max((is_same & is_before).to(tl.int32), axis=1), 0)
    is_parent = (parent[None, :] == beam[:, None]) & inside[None, :]
    is_unused = tl.where(inside, 1 - tl.max(is_parent.to(tl.int32), axis=1), 0)
    copy_rank = tl.sum(tl.where(is_before, is_copy[None, :], 0), axis=1)
    unused_rank = tl.sum(tl.where(is_before, is_unused[None, :], 0), axis=1)
    is_match = (unused_rank[None, :] == copy_rank[:, None]) & (is_unused[None, :] != 0)
    return is_copy, tl.sum(tl.where(is_match, other, 0), axis=1)


@triton.jit
def _follow_kernel(
    searches_ptr,  # [searches, FOLLOW_COLUMNS]
    beam_slots_ptr,  # [beams]
    given_ptr,  # [beams, 2]
    context_lens_ptr,  # [rows]
    cu_blocks_ptr,  # [rows + 1]
    tables_ptr,  # [2, BEAM_SLOTS, BLOCKS]
    parents_ptr,  # [2, BEAM_SLOTS]
    tokens_ptr,  # [2, BEAM_SLOTS]
    token_ids_ptr,  # [rows]
    block_ids_ptr,  # [blocks]
    slots_ptr,  # [rows] int64
    copies_ptr,  # [beams, 2]
    BEAM_SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BEAMS: tl.constexpr,  # power of two >= beams
    BLOCK_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    searches_ptr += tl.program_id(0) * _FOLLOW_COLUMNS
    first_row, beams = tl.load(searches_ptr), tl.load(searches_ptr + 1)
    length, first_beam = tl.load(searches_ptr + 2), tl.load(searches_ptr + 3)
    half = length % 2
    beam = tl.arange(0, BLOCK_BEAMS)
    inside = beam < beams
    own = tl.load(beam_slots_ptr + first_beam + beam, mask=inside, other=0)
    kept = half * BEAM_SLOTS + own
    given_ptr += (first_beam + beam) * 2
    given = tl.load(given_ptr, mask=inside, other=0)
    is_given = given != _NOT_GIVEN
    parent = tl.where(is_given, given, tl.load(parents_ptr + kept, mask=inside, other=0))
    token = tl.load(given_ptr + 1, mask=inside, other=0)
    token = tl.where(is_given, token, tl.load(tokens_ptr + kept, mask=inside, other=0))
    tl.store(parents_ptr + kept, parent, mask=inside)
    tl.store(tokens_ptr + kept, token, mask=inside)

    position = tl.load(context_lens_ptr + first_row) - 1
    last, place = position // BLOCK_SIZE, position % BLOCK_SIZE
    row = first_row + beam
    table_ptr = block_ids_ptr + tl.load(cu_blocks_ptr + row, mask=inside, other=0)
    now_ptr = tables_ptr + kept.to(tl.int64) * BLOCKS
    before = (1 - half) * BEAM_SLOTS
    of_parent = tl.load(beam_slots_ptr + first_beam + parent, mask=inside, other=0)
    parent_ptr = tables_ptr + (before + of_parent).to(tl.int64) * BLOCKS
    # the first tables are in the step
    source_ptr = tl.where(length > 1, parent_ptr, table_ptr)
    for first in range(0, last, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
        is_block = inside[:, None] & (column < last)
        block = tl.load(source_ptr[:, None] + column, mask=is_block, other=0)
        tl.store(table_ptr[:, None] + column, block, mask=is_block)
        tl.store(now_ptr[:, None] + column, block, mask=is_block)

    goes_on = (length > 1) & (place > 0)
    block_ptr = tl.where(goes_on, parent_ptr, table_ptr)
    block = tl.load(block_ptr + last, mask=inside, other=0)
    is_copy, unused = _copies(parent, beam, inside)
    is_copy = tl.where(goes_on, is_copy, 0)
    of_unused = tl.load(beam_slots_ptr + first_beam + unused, mask=inside, other=0)
    unused_ptr = tables_ptr + (before + of_unused).to(tl.int64) * BLOCKS + last
    written = tl.load(unused_ptr, mask=is_copy != 0, other=0)
    written = tl.where(is_copy != 0, written, block)
    tl.store(table_ptr + last, written, mask=inside)
    tl.store(now_ptr + last, written, mask=inside)
    # the first beam has the end of the prompt
    prompt_block = tl.load(block_ids_ptr + tl.load(cu_blocks_ptr + first_row) + last)
    source = tl.where((length == 1) & (place > 0), prompt_block, block)
    copies_ptr += (first_beam + beam) * 2
    tl.store(copies_ptr, source, mask=inside)
    tl.store(copies_ptr + 1, written, mask=inside)
    tl.store(token_ids_ptr + row, token, mask=inside)
    tl.store(slots_ptr + row, written.to(tl.int64) * BLOCK_SIZE + place, mask=inside)


def follow_beams(
    state: SearchState,
    searches: Tensor,
    beam_slots: Tensor,
    given: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
    cu_blocks: Tensor,
    block_ids: Tensor,
    slots: Tensor,
    copies: Tensor,
    *,
    block_size: int,
) -> None:
    """Give each beam its token and its block table, see `reference.follow_beams`."""
    check_contiguous(searches=searches, given=given, copies=copies, **state._asdict())
    _follow_kernel[(len(searches),)](
        searches,
        beam_slots,
        given,
        context_lens,
        cu_blocks,
        state.tables,
        state.parents,
        state.tokens,
        token_ids,
        block_ids,
        slots,
        copies,
        BEAM_SLOTS=state.tables.shape[1],
        BLOCKS=state.tables.shape[2],
        BLOCK_SIZE=block_size,
        BLOCK_BEAMS=block_beams(state),
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        num_warps=1,
        enable_fp_fusion=False,
        **dependent_launch(),
    )


def block_beams(state: SearchState) -> int:
    """Return a power of two that is enough for the beams of any search."""
    block: int = triton.next_power_of_2(min(state.tables.shape[1], reference.MAX_BEAMS))
    return block


_NO_TOKEN = tl.constexpr(functions.NO_TOKEN)
_IS_LAST, _ENDS_WHEN_FULL = (
    tl.constexpr(flag) for flag in (functions.IS_LAST, functions.ENDS_WHEN_FULL)
)
_ADVANCE_COLUMNS = tl.constexpr(reference.ADVANCE_COLUMNS)
# End tokens that a program reads at once.
_BLOCK_ENDS = 32


@triton.jit
def _shifted(values, beam, place, value):
    """Return values with one inserted at a place; those after it move by one place."""
    is_before = beam[None, :] + 1 == beam[:, None]
    moved = tl.sum(tl.where(is_before, values[None, :], 0), axis=1)
    return tl.where(beam < place, values, tl.where(beam == place, value, moved))


@triton.jit
def _best_candidate(
    tokens_ptr,  # [BLOCK_BEAMS], next candidate of each beam
    logprobs_ptr,  # [BLOCK_BEAMS]
    scores,  # [BLOCK_BEAMS]
    beam,  # [BLOCK_BEAMS]
    is_listed,  # [BLOCK_BEAMS]
    is_forced,  # [BLOCK_BEAMS], the forced token is its only candidate
    forced,
):
    """Return score, beam and token of the best candidate, and whether one is left."""
    candidate = tl.load(tokens_ptr, mask=is_listed, other=_NO_TOKEN)
    candidate = tl.where(is_forced, forced, candidate)
    total = scores + tl.load(logprobs_ptr, mask=is_listed, other=0.0)
    is_possible = (candidate != _NO_TOKEN) & (total > float("-inf"))
    key = tl.where(is_possible, key_of(total), NO_KEY)
    best = tl.max(key, axis=0)
    # among equal scores the lower beam
    best_beam = tl.min(tl.where(key == best, beam, NO_INDEX), axis=0)
    best_token = tl.max(tl.where(beam == best_beam, candidate, 0), axis=0)
    return value_of(best), best_beam, best_token, (best != NO_KEY).to(tl.int32)


@triton.jit
def _is_among(
    ends_ptr,  # [ends]
    first,
    end,
    token,
    BLOCK_ENDS: tl.constexpr,
):
    found = 0
    for block in range(first, end, BLOCK_ENDS):
        place = block + tl.arange(0, BLOCK_ENDS)
        other = tl.load(ends_ptr + place, mask=place < end, other=_NO_TOKEN)
        found = tl.maximum(found, tl.max((other == token).to(tl.int32), axis=0))
    return found


@triton.jit
def _store_each(
    first_ptr,  # [BLOCK_BEAMS]
    second_ptr,  # [BLOCK_BEAMS]
    values,  # [BLOCK_BEAMS]
    inside,
):
    tl.store(first_ptr, values, mask=inside)
    tl.store(second_ptr, values, mask=inside)


@triton.jit
def _choose(
    found_tokens_ptr,  # [num_rows, WIDTH]
    logprobs_ptr,  # [num_rows, WIDTH]
    ends_ptr,  # [ends]
    divisor,
    score_before,  # [BLOCK_BEAMS]
    answer_score,  # [BLOCK_BEAMS], the answers so far
    answer_token,  # [BLOCK_BEAMS]
    answer_parent,  # [BLOCK_BEAMS]
    answer_length,  # [BLOCK_BEAMS]
    count,  # number of answers
    beam,  # [BLOCK_BEAMS]
    num_rows,
    beams,
    length,
    is_last,
    forced,
    first_end,
    end,
    WIDTH: tl.constexpr,
    BLOCK_BEAMS: tl.constexpr,
    BLOCK_ENDS: tl.constexpr,
):
    """Return the next beams and the answers.

    The beams are scores, parents, tokens and a number; the answers are four vectors and their number.
    """
    score = tl.full([BLOCK_BEAMS], float("-inf"), tl.float32)
    parent = tl.zeros([BLOCK_BEAMS], tl.int32)
    token = tl.zeros([BLOCK_BEAMS], tl.int32)
    listed = tl.where(forced == _NO_TOKEN, WIDTH, 0)
    is_row = beam < num_rows
    # place of the next candidate of each beam
    head = tl.zeros([BLOCK_BEAMS], tl.int32)
    live, rank, is_left = 0, 0, 1
    while (live < beams) & (is_left != 0):
        best_score, best_beam, best_token, is_left = _best_candidate(
            found_tokens_ptr + beam * WIDTH + head,
            logprobs_ptr + beam * WIDTH + head,
            score_before,
            beam,
            is_row & (head < listed),
            is_row & (head < 1 - listed),
            forced,
        )
        head = tl.where(beam == best_beam, head + 1, head)
        is_end = _is_among(ends_ptr, first_end, end, best_token, BLOCK_ENDS)
        if is_left != 0:
            if (rank < beams) & ((is_end | is_last) != 0):
                new_score = tl.math.div_rn(best_score, divisor)
                is_better = (beam < count) & (answer_score >= new_score)
                place = tl.sum(is_better.to(tl.int32), axis=0)
                answer_score = _shifted(answer_score, beam, place, new_score)
                answer_token = _shifted(answer_token, beam, place, best_token)
                answer_parent = _shifted(answer_parent, beam, place, best_beam)
                answer_length = _shifted(answer_length, beam, place, length)
                count = tl.minimum(count + 1, beams)
            if is_end == 0:
                is_new = beam == live
                score = tl.where(is_new, best_score, score)
                parent = tl.where(is_new, best_beam, parent)
                token = tl.where(is_new, best_token, token)
                live += 1
            rank += 1
    return (
        score,
        parent,
        token,
        live,
        answer_score,
        answer_token,
        answer_parent,
        answer_length,
        count,
    )


# what follows other results in one tensor has any alignment
@triton.jit(do_not_specialize_on_alignment=["out_beams_ptr", "out_scores_ptr"])
def _advance_kernel(
    found_tokens_ptr,  # [rows, WIDTH]
    logprobs_ptr,  # [rows, WIDTH]
    searches_ptr,  # [searches, ADVANCE_COLUMNS]
    beam_slots_ptr,  # [beams]
    divisors_ptr,  # [searches, 2]
    ends_ptr,  # [ends]
    parents_ptr,  # [2, BEAM_SLOTS], and so on
    tokens_ptr,
    scores_ptr,
    answers_ptr,  # [2, BEAM_SLOTS, 3]
    answer_scores_ptr,  # [2, BEAM_SLOTS]
    num_answers_ptr,  # [2, BEAM_SLOTS]
    out_ends_ptr,  # [searches, 2]
    out_beams_ptr,  # [beams, 5]
    out_scores_ptr,  # [beams]
    WIDTH: tl.constexpr,
    BEAM_SLOTS: tl.constexpr,
    BLOCK_BEAMS: tl.constexpr,  # power of two >= beams
    BLOCK_ENDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    search = tl.program_id(0)
    searches_ptr += search * _ADVANCE_COLUMNS
    divisors_ptr += search * 2
    out_ends_ptr += search * 2
    first_row, num_rows = tl.load(searches_ptr), tl.load(searches_ptr + 1)
    beams, length = tl.load(searches_ptr + 2), tl.load(searches_ptr + 3)
    flags, first_beam = tl.load(searches_ptr + 4), tl.load(searches_ptr + 8)
    beam = tl.arange(0, BLOCK_BEAMS)
    inside = beam < beams
    own = tl.load(beam_slots_ptr + first_beam + beam, mask=inside, other=0)
    half = length % 2
    kept = half * BEAM_SLOTS + own
    kept_before = (1 - half) * BEAM_SLOTS + own
    first_slot = tl.load(beam_slots_ptr + first_beam)
    is_first = length == 1
    num_rows = tl.where(is_first, 1, num_rows)
    score_before = tl.load(scores_ptr + kept_before, mask=beam < num_rows, other=0.0)
    count = tl.load(num_answers_ptr + (1 - half) * BEAM_SLOTS + first_slot)
    count = tl.where(is_first, 0, count)
    is_answer = beam < count
    (
        score,
        parent,
        token,
        live,
        answer_score,
        answer_token,
        answer_parent,
        answer_length,
        count,
    ) = _choose(
        found_tokens_ptr + first_row * WIDTH,
        logprobs_ptr + first_row * WIDTH,
        ends_ptr,
        tl.load(divisors_ptr),
        tl.where(is_first, 0.0, score_before),
        tl.load(answer_scores_ptr + kept_before, mask=is_answer, other=0.0),
        tl.load(answers_ptr + kept_before * 3, mask=is_answer, other=0),
        tl.load(answers_ptr + kept_before * 3 + 1, mask=is_answer, other=0),
        tl.load(answers_ptr + kept_before * 3 + 2, mask=is_answer, other=0),
        count,
        beam,
        num_rows,
        beams,
        length,
        flags & _IS_LAST,
        tl.load(searches_ptr + 5),
        tl.load(searches_ptr + 6),
        tl.load(searches_ptr + 7),
        WIDTH,
        BLOCK_BEAMS,
        BLOCK_ENDS,
    )
    tl.store(scores_ptr + kept, score, mask=inside)
    tl.store(num_answers_ptr + half * BEAM_SLOTS + first_slot, count)
    out = first_beam + beam
    _store_each(parents_ptr + kept, out_beams_ptr + out * 5, parent, inside)
    _store_each(tokens_ptr + kept, out_beams_ptr + out * 5 + 1, token, inside)
    _store_each(answers_ptr + kept * 3, out_beams_ptr + out * 5 + 2, answer_token, inside)
    _store_each(answers_ptr + kept * 3 + 1, out_beams_ptr + out * 5 + 3, answer_parent, inside)
    _store_each(answers_ptr + kept * 3 + 2, out_beams_ptr + out * 5 + 4, answer_length, inside)
    _store_each(answer_scores_ptr + kept, out_scores_ptr + out, answer_score, inside)
    worst = tl.sum(tl.where(beam == beams - 1, answer_score, 0.0), axis=0)
    best_live = tl.max(tl.where(inside, score, float("-inf")), axis=0)
    is_final = tl.math.div_rn(best_live, tl.load(divisors_ptr + 1)) <= worst
    has_ended = tl.where(is_final, 1, flags & _ENDS_WHEN_FULL)
    has_ended = tl.where(count == beams, has_ended, 0)
    has_ended = tl.where(live == 0, 1, has_ended) | (flags & _IS_LAST)
    tl.store(out_ends_ptr, tl.where(has_ended != 0, 1, 0))
    tl.store(out_ends_ptr + 1, count)


def advance_searches(
    found: BeamCandidates,
    searches: Tensor,
    beam_slots: Tensor,
    divisors: Tensor,
    ends: Tensor,
    state: SearchState,
    out: SearchResults,
) -> None:
    """Choose the beams of the next step, and the answers, see `reference.advance_searches`."""
    check_contiguous(searches=searches, divisors=divisors, **state._asdict())
    check_contiguous(**{f"out.{name}": tensor for name, tensor in out._asdict().items()})
    _, *kept = state
    _advance_kernel[(len(searches),)](
        found.tokens,
        found.scores,
        searches,
        beam_slots,
        divisors,
        ends,
        *kept,
        *out,
        WIDTH=found.tokens.shape[1],
        BEAM_SLOTS=state.tables.shape[1],
        BLOCK_BEAMS=block_beams(state),
        BLOCK_ENDS=_BLOCK_ENDS,
        num_warps=1,
        enable_fp_fusion=False,
        **dependent_launch(),
    )
