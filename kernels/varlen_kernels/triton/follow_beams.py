"""Tokens and block tables of beams, before the model.

One program of one warp has one search, and one lane has one beam; what depends on pairs of beams compares all of them.
Nothing waits for the host, so steps can follow each other.
Source: the specification is `reference.beam_search`.
"""

import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference import beam_search as reference
from varlen_kernels.reference.beam_search import SearchState
from varlen_kernels.triton.checks import check_contiguous
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels

_NOT_GIVEN = tl.constexpr(reference.NOT_GIVEN)
_FOLLOW_COLUMNS = tl.constexpr(reference.FOLLOW_COLUMNS)
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
    """Give the beams of one search their tokens and block tables."""
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
