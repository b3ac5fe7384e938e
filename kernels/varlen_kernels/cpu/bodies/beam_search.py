"""Steps of searches with beams on a CPU, without the model, compiled by numba.

Source: the specification is `reference.beam_search`.
"""

import numpy as np

from varlen_kernels.cpu.native.native import inlined, inlined_body
from varlen_kernels.reference.beam import NO_TOKEN
from varlen_kernels.reference.beam_search import ENDS_WHEN_FULL, IS_LAST, NOT_GIVEN

_LOWEST = np.float32(-np.inf)


@inlined
def _is_continued(parents, beam_slots, count, parent):
    """Return whether one of the first beams of a search continues a beam."""
    found = False
    for beam in range(count):
        found |= parents[beam_slots[beam]] == parent
    return found


@inlined
def _is_among(values, wanted):
    """Return whether a value is one of some."""
    found = False
    for value in values:
        found |= value == wanted
    return found


@inlined_body
def follow_beams(
    first,
    last,
    searches,  # [searches, 4]
    beam_slots,  # [beams]
    given,  # [beams, 2]
    context_lens,  # [rows]
    cu_blocks,  # [rows + 1]
    tables,  # [2, beam slots, blocks]
    parents,  # [2, beam slots]
    tokens,  # [2, beam slots]
    token_ids,  # [rows]
    block_ids,  # [blocks]
    slots,  # [rows]
    copies,  # [beams, 2]
    block_size,
):
    """Give the beams of some searches their tokens and block tables."""
    for search in range(first, last):
        first_row, beams = searches[search, 0], searches[search, 1]
        length, first_beam = searches[search, 2], searches[search, 3]
        half = length % 2
        before = tables[1 - half]
        own = beam_slots[first_beam : first_beam + beams]
        for beam in range(beams):
            if given[first_beam + beam, 0] != NOT_GIVEN:
                parents[half, own[beam]] = given[first_beam + beam, 0]
                tokens[half, own[beam]] = given[first_beam + beam, 1]
        position = context_lens[first_row] - 1
        whole, place = position // block_size, position % block_size
        unused = 0
        for beam in range(beams):
            row, parent = first_row + beam, parents[half, own[beam]]
            table = block_ids[cu_blocks[row] : cu_blocks[row] + whole + 1]
            if length > 1:
                for column in range(whole + (place > 0)):
                    table[column] = before[own[parent], column]
            source = table[whole]
            if length == 1 and place > 0:
                # the end of the prompt
                source = block_ids[cu_blocks[first_row] + whole]
            elif place > 0 and _is_continued(parents[half], own, beam, parent):
                while _is_continued(parents[half], own, beams, unused):
                    unused += 1
                table[whole] = before[own[unused], whole]
                unused += 1
            copies[first_beam + beam, 0], copies[first_beam + beam, 1] = source, table[whole]
            for column in range(whole + 1):
                tables[half, own[beam], column] = table[column]
            token_ids[row] = tokens[half, own[beam]]
            slots[row] = np.int64(table[whole]) * block_size + place
    return 0


@inlined
def _copy_answer(answers, scores, slot, to_answers, to_scores, to_slot):
    """Copy an answer of three numbers, and its score."""
    to_scores[to_slot] = scores[slot]
    for column in range(3):
        to_answers[to_slot, column] = answers[slot, column]


@inlined
def _insert_answer(
    score,
    token,
    parent,
    length,
    count,
    beam_slots,  # [beams]
    scores,  # [beam slots]
    answers,  # [beam slots, 3]
):
    """Insert an answer after those that are better or equal; return the number of answers."""
    beams = len(beam_slots)
    if count == beams and not score > scores[beam_slots[beams - 1]]:
        return count
    rank = min(count, beams - 1)
    while rank > 0 and scores[beam_slots[rank - 1]] < score:
        _copy_answer(answers, scores, beam_slots[rank - 1], answers, scores, beam_slots[rank])
        rank -= 1
    at = beam_slots[rank]
    scores[at], answers[at, 0], answers[at, 1], answers[at, 2] = score, token, parent, length
    return min(count + 1, beams)


@inlined
def _best_candidate(
    logprobs,  # [rows, width]
    tokens,  # [rows, width]
    first_row,
    num_rows,
    forced,
    beam_slots,  # [beams]
    scores,  # [beam slots]
    heads,  # [beams], place of the next candidate of each beam
):
    """Return score, beam and token of the best candidate that is left; NO_TOKEN without one."""
    best, parent, token = _LOWEST, 0, np.int32(NO_TOKEN)
    for beam in range(num_rows):
        at, row = heads[beam], first_row + beam
        score, candidate = scores[beam_slots[beam]], forced
        if forced == NO_TOKEN and at < logprobs.shape[1]:
            score, candidate = score + logprobs[row, at], tokens[row, at]
        elif at > 0:
            candidate = np.int32(NO_TOKEN)
        if candidate != NO_TOKEN and score > best:
            best, parent, token = score, beam, candidate
    return best, parent, token


@inlined_body
def advance_searches(
    first,
    last,
    found_tokens,  # [rows, width]
    logprobs,  # [rows, width]
    searches,  # [searches, 9]
    beam_slots,  # [beams]
    divisors,  # [searches, 2]
    ends,  # [ends]
    parents,  # [2, beam slots], and so on
    tokens,
    scores,
    answers,  # [2, beam slots, 3]
    answer_scores,  # [2, beam slots]
    num_answers,  # [2, beam slots]
    heads,  # [beams], overwritten: place of the next candidate of each beam
    out_ends,  # [searches, 2]
    out_beams,  # [beams, 5]
    out_scores,  # [beams]
):
    """Choose the beams and the answers of some searches."""
    for search in range(first, last):
        first_row, num_rows = searches[search, 0], searches[search, 1]
        beams, length, flags = searches[search, 2], searches[search, 3], searches[search, 4]
        forced, first_beam = searches[search, 5], searches[search, 8]
        of_search = ends[searches[search, 6] : searches[search, 7]]
        own = beam_slots[first_beam : first_beam + beams]
        half = length % 2
        count = num_answers[1 - half, own[0]]
        if length == 1:
            scores[1 - half, own[0]], count = 0, 0
        for rank in range(count):
            before = answers[1 - half], answer_scores[1 - half], own[rank]
            _copy_answer(*before, answers[half], answer_scores[half], own[rank])
        head, chosen = heads[first_beam : first_beam + beams], out_beams[first_beam:]
        for beam in range(num_rows):
            head[beam] = 0
        live, rank = 0, 0
        while live < beams:
            best, parent, token = _best_candidate(
                logprobs, found_tokens, first_row, num_rows, forced, own, scores[1 - half], head
            )
            if token == NO_TOKEN:
                break
            head[parent] += 1
            is_end = _is_among(of_search, token)
            if rank < beams and (is_end or flags & IS_LAST):
                score = best / divisors[search, 0]
                of_half = answer_scores[half], answers[half]
                count = _insert_answer(score, token, parent, length, count, own, *of_half)
            rank += 1
            if not is_end:
                at = half, own[live]
                scores[at], parents[at], tokens[at] = best, parent, token
                live += 1
        for beam in range(live, beams):
            at = half, own[beam]
            scores[at], parents[at], tokens[at] = _LOWEST, 0, 0
        has_ended = live == 0 or flags & IS_LAST != 0
        if count == beams and not has_ended:
            worst, best = answer_scores[half, own[beams - 1]], scores[half, own[0]]
            has_ended = flags & ENDS_WHEN_FULL != 0 or best / divisors[search, 1] <= worst
        num_answers[half, own[0]] = count
        out_ends[search, 0], out_ends[search, 1] = has_ended, count
        for beam in range(beams):
            chosen[beam, 0], chosen[beam, 1] = parents[half, own[beam]], tokens[half, own[beam]]
            if beam < count:
                kept = answers[half], answer_scores[half], own[beam]
                _copy_answer(*kept, chosen[:, 2:], out_scores[first_beam:], beam)
    return 0
