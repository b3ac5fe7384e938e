"""What searches with beams do in a step on a CPU, apart from the model, compiled by numba.

Source: the specification is `reference.beam_search`.
"""

import numpy as np

from varlen_kernels.cpu.native import inlined
from varlen_kernels.reference.beam import NO_TOKEN
from varlen_kernels.reference.beam_search import ENDS_WHEN_FULL, IS_LAST, NOT_GIVEN

_LOWEST = np.float32(-np.inf)


@inlined
def _place_of(values, count, wanted):
    """Return the first place of a value among some; `count` if it is not there."""
    for place in range(count):
        if values[place] == wanted:
            return place
    return count


@inlined
def follow_some_beams(
    first,
    last,
    searches,  # [searches, 5]
    given,  # [beams, 2]
    position_ids,  # [rows]
    cu_blocks,  # [rows + 1]
    tables,  # [2 * searches of the state, beams, blocks]
    parents,  # [2 * searches of the state, beams]
    tokens,  # [2 * searches of the state, beams]
    token_ids,  # [rows]
    block_ids,  # [blocks]
    slots,  # [rows]
    copies,  # [beams, 2]
    block_size,
):
    """Give the beams of some searches their tokens and block tables."""
    for search in range(first, last):
        number, first_row = searches[search, 0], searches[search, 1]
        beams, length, first_beam = searches[search, 2], searches[search, 3], searches[search, 4]
        half = tables.shape[0] // 2
        own = length % 2 * half + number
        now, before = tables[own], tables[(length - 1) % 2 * half + number]
        for beam in range(beams):
            if given[first_beam + beam, 0] != NOT_GIVEN:
                parents[own, beam] = given[first_beam + beam, 0]
                tokens[own, beam] = given[first_beam + beam, 1]
        position = position_ids[first_row]
        whole, place = position // block_size, position % block_size
        unused = 0
        for beam in range(beams):
            row = first_row + beam
            table = block_ids[cu_blocks[row] : cu_blocks[row] + whole + 1]
            parent = parents[own, beam]
            if length > 1:
                for column in range(whole + (place > 0)):
                    table[column] = before[parent, column]
            source = table[whole]
            if length == 1 and place > 0:
                # the end of the prompt
                source = block_ids[cu_blocks[first_row] + whole]
            elif place > 0 and _place_of(parents[own], beam, parent) < beam:
                while _place_of(parents[own], beams, unused) < beams:
                    unused += 1
                table[whole] = before[unused, whole]
                unused += 1
            copies[first_beam + beam, 0], copies[first_beam + beam, 1] = source, table[whole]
            for column in range(whole + 1):
                now[beam, column] = table[column]
            token_ids[row] = tokens[own, beam]
            slots[row] = np.int64(table[whole]) * block_size + place
    return 0


@inlined
def _insert_answer(
    score,
    token,
    parent,
    length,
    count,
    scores,  # [beams]
    answers,  # [beams, 3]
    beams,
):
    """Insert an answer after those that are better or equal; return the number of answers."""
    if count == beams and not score > scores[beams - 1]:
        return count
    place = min(count, beams - 1)
    while place > 0 and scores[place - 1] < score:
        scores[place] = scores[place - 1]
        for column in range(3):
            answers[place, column] = answers[place - 1, column]
        place -= 1
    scores[place] = score
    answers[place, 0], answers[place, 1], answers[place, 2] = token, parent, length
    return min(count + 1, beams)


@inlined
def _copy_answers(answers, scores, count, to_answers, to_scores):
    """Copy the answers of a search, `[answers, 3]`, and their scores."""
    for place in range(count):
        to_scores[place] = scores[place]
        for column in range(3):
            to_answers[place, column] = answers[place, column]


@inlined
def _best_candidate(
    logprobs,  # [rows, width]
    tokens,  # [rows, width]
    first_row,
    num_rows,
    forced,
    scores,  # [beams]
    heads,  # [beams], place of the next candidate of each beam
):
    """Return score, beam and token of the best candidate that is left; NO_TOKEN without one."""
    best, parent, token = _LOWEST, 0, np.int32(NO_TOKEN)
    for beam in range(num_rows):
        at, row = heads[beam], first_row + beam
        score, candidate = scores[beam], forced
        if forced == NO_TOKEN and at < logprobs.shape[1]:
            score, candidate = score + logprobs[row, at], tokens[row, at]
        elif at > 0:
            candidate = np.int32(NO_TOKEN)
        if candidate != NO_TOKEN and score > best:
            best, parent, token = score, beam, candidate
    return best, parent, token


@inlined
def advance_some_searches(
    first,
    last,
    found_tokens,  # [rows, width]
    logprobs,  # [rows, width]
    searches,  # [searches, 10]
    divisors,  # [searches, 2]
    ends,  # [ends]
    parents,  # [2 * searches of the state, beams], and so on
    tokens,
    scores,
    num_answers,  # [2 * searches of the state]
    answers,  # [2 * searches of the state, beams, 3]
    answer_scores,  # [2 * searches of the state, beams]
    heads,  # [beams], overwritten: place of the next candidate of each beam
    out_ends,  # [searches, 2]
    out_beams,  # [beams, 5]
    out_scores,  # [beams]
):
    """Choose the beams and the answers of some searches, whose beams are at the end of the others."""
    for search in range(first, last):
        number, first_row, num_rows = searches[search, 0], searches[search, 1], searches[search, 2]
        beams, length, flags = searches[search, 3], searches[search, 4], searches[search, 5]
        forced, first_beam = searches[search, 6], searches[search, 9]
        of_search = ends[searches[search, 7] : searches[search, 8]]
        half = len(num_answers) // 2
        own, before = length % 2 * half + number, (length - 1) % 2 * half + number
        count = num_answers[before]
        if length == 1:
            scores[before, 0], count = 0, 0
        _copy_answers(
            answers[before], answer_scores[before], count, answers[own], answer_scores[own]
        )
        head, chosen = heads[first_beam : first_beam + beams], out_beams[first_beam:]
        for beam in range(num_rows):
            head[beam] = 0
        live, rank = 0, 0
        while live < beams:
            best, parent, token = _best_candidate(
                logprobs, found_tokens, first_row, num_rows, forced, scores[before], head
            )
            if token == NO_TOKEN:
                break
            head[parent] += 1
            is_end = _place_of(of_search, len(of_search), token) < len(of_search)
            if rank < beams and (is_end or flags & IS_LAST):
                count = _insert_answer(
                    best / divisors[search, 0],
                    token,
                    parent,
                    length,
                    count,
                    answer_scores[own],
                    answers[own],
                    beams,
                )
            rank += 1
            if not is_end:
                scores[own, live], parents[own, live], tokens[own, live] = best, parent, token
                live += 1
        for beam in range(live, beams):
            scores[own, beam], parents[own, beam], tokens[own, beam] = _LOWEST, 0, 0
        has_ended = live == 0 or flags & IS_LAST != 0
        if count == beams and not has_ended:
            worst, best = answer_scores[own, beams - 1], scores[own, 0]
            has_ended = flags & ENDS_WHEN_FULL != 0 or best / divisors[search, 1] <= worst
        num_answers[own] = count
        out_ends[search, 0], out_ends[search, 1] = has_ended, count
        for beam in range(beams):
            chosen[beam, 0], chosen[beam, 1] = parents[own, beam], tokens[own, beam]
        _copy_answers(
            answers[own], answer_scores[own], count, chosen[:, 2:], out_scores[first_beam:]
        )
    return 0
