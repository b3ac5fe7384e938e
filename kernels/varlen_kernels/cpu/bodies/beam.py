"""Steps of beam search on a CPU, with the model and without, compiled by numba.

A row of logits is read once from memory, in chunks that stay in the cache of a core. A chunk is searched for its
maximum, summed as exponentials, and searched for logits above the floor, which is the worst of the best logits so far.
Few logits of a row are above it, and nothing is sorted.
"""

import math

import numpy as np

from varlen_kernels.cpu.native.lanes import exp, largest_of, load, maximum, splat, sum_of
from varlen_kernels.cpu.native.native import (
    aligned,
    clear,
    fp32_matrix,
    fp32_vector,
    free_memory,
    inlined,
    inlined_body,
    int32_vector,
    new_memory,
    uint8_vector,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.functions import ENDS_WHEN_FULL, IS_LAST, NO_TOKEN, NOT_GIVEN
from varlen_kernels.reference.beam import NO_PARENT

_CHUNK = 2048
# Adjacent logits that are compared with the floor at once.
_GROUP = 64
_LARGEST = np.float32(np.finfo(np.float32).max)
_LOWEST = np.float32(-np.inf)
_ZERO = np.float32(0)


@inlined
def _without_infinity(x):
    """Return x, and the largest finite number instead of +inf."""
    return min(x, _LARGEST)


@inlined
def _maximum(x, row, begin, end):
    """Return the largest number of a part of a row; NaN counts as -inf."""
    whole = begin + (end - begin) // LANES * LANES
    lanes = splat(_LOWEST)
    for column in range(begin, whole, LANES):
        lanes = maximum(load(x, row, column), lanes)
    largest = largest_of(lanes)
    for column in range(whole, end):
        largest = max(largest, x[row, column])
    return largest


@inlined
def _sum_exp(x, row, begin, end, peak):
    """Return the sum of exp(x - peak) of a part of a row.

    NaN and -inf count as 0.

    Args:
        peak: no number is above it.
    """
    whole = begin + (end - begin) // LANES * LANES
    lanes = splat(_ZERO)
    for column in range(begin, whole, LANES):
        lanes = lanes + exp(load(x, row, column) - splat(peak))
    total = np.float64(sum_of(lanes))
    for column in range(whole, end):
        # NaN is not above any number
        if x[row, column] > _LOWEST:
            total += math.exp(x[row, column] - peak)
    return total


@inlined
def _search_group(
    x,
    row,
    begin,
    end,
    first_token,
    edited,  # [vocabulary] bytes
    floor,
    found,
    best_logits,  # [width], sorted
    best_tokens,  # [width]
):
    """Insert logits above `floor` into the best; return their number and the floor."""
    width = len(best_logits)
    for column in range(begin, end):
        logit, token = x[row, column], first_token + column - begin
        # an equal logit of a higher token is worse
        if logit > floor and edited[token] == 0:
            place = min(found, width - 1)
            while place > 0 and best_logits[place - 1] < logit:
                best_logits[place] = best_logits[place - 1]
                best_tokens[place] = best_tokens[place - 1]
                place -= 1
            best_logits[place], best_tokens[place] = logit, token
            found = min(found + 1, width)
            if found == width:
                floor = best_logits[width - 1]
    return found, floor


@inlined
def _search_row(
    logits,  # [rows, vocabulary]
    row,
    edited,  # [vocabulary] bytes, tokens to leave out of the search
    best_logits,  # [width], overwritten
    best_tokens,  # [width], overwritten
    clean,  # [1, _CHUNK], overwritten
):
    """Write the best logits of a row in order.

    Return their number, the row's maximum, and log Σ exp(logit - maximum); 0 for a row of only -inf.
    """
    found, peak, total, floor = 0, _LOWEST, 0.0, _LOWEST
    for start in range(0, logits.shape[1], _CHUNK):
        x, in_row, begin = logits, row, start
        end = min(start + _CHUNK, logits.shape[1])
        largest = _maximum(x, in_row, begin, end)
        if largest > _LARGEST:
            for column in range(begin, end):
                clean[0, column - begin] = _without_infinity(x[in_row, column])
            x, in_row, begin, end, largest = clean, 0, 0, end - begin, _LARGEST
        if largest > peak:
            # what was summed with a smaller maximum counts less
            total *= math.exp(peak - largest)
            peak = largest
        if peak > _LOWEST:
            total += _sum_exp(x, in_row, begin, end, peak)
        if not largest > floor:
            continue
        for first in range(begin, end, _GROUP):
            last = min(first + _GROUP, end)
            if _maximum(x, in_row, first, last) > floor:
                token = start + first - begin
                found, floor = _search_group(
                    x, in_row, first, last, token, edited, floor, found, best_logits, best_tokens
                )
    if peak == _LOWEST:
        return found, np.float32(0.0), np.float32(0.0)
    return found, peak, np.float32(math.log(total))


@inlined
def _insert(
    score,
    beam,
    token,
    is_edited,
    found,
    tokens,  # [width], of one sequence, and so on
    parents,
    scores,
    edited,
):
    """Insert a candidate after those that are better or equal; return the number of candidates."""
    width = len(scores)
    if not score > _LOWEST or (found == width and score < scores[width - 1]):
        return found
    place = found
    while place > 0:
        other = place - 1
        # the edited tokens of a beam come in any order
        is_before = (
            is_edited != 0
            and edited[other] != 0
            and parents[other] == beam
            and token < tokens[other]
        )
        if not (scores[other] < score or (scores[other] == score and is_before)):
            break
        if place < width:
            tokens[place], parents[place] = tokens[other], parents[other]
            scores[place], edited[place] = scores[other], edited[other]
        place = other
    if place < width:
        tokens[place], parents[place] = token, beam
        scores[place], edited[place] = score, is_edited
    return min(found + 1, width)


@inlined_body
def step_beams(
    first,
    last,
    logits,  # [sequences * beams, vocabulary]
    beam_scores,  # [sequences, beams]
    finished,  # [sequences]
    bounds,  # [sequences * beams + 1], of the edits of each row
    edit_tokens,  # [edits]
    edit_factors,  # [edits]
    tokens,  # [sequences, width]
    parents,  # [sequences, width]
    scores,  # [sequences, width]
):
    """Write the candidates of some sequences; return whether memory ran out."""
    beams, width = beam_scores.shape[1], tokens.shape[1]
    vocabulary = logits.shape[1]
    chunk_bytes, width_bytes = 4 * _CHUNK, aligned(4 * width)
    term_bytes, marked_bytes = aligned(12 * beams), aligned(vocabulary)
    memory = new_memory(chunk_bytes + 3 * width_bytes + term_bytes + marked_bytes)
    if memory == 0:
        return 1
    clean = fp32_matrix(memory, 1, _CHUNK)
    place = memory + chunk_bytes
    best_logits, best_tokens = fp32_vector(place, width), int32_vector(place + width_bytes, width)
    edited = uint8_vector(place + 2 * width_bytes, width)
    place += 3 * width_bytes
    # the beam's score, and its row's maximum and log Σ exp
    terms = fp32_matrix(place, beams, 3)
    clear(place + term_bytes, marked_bytes)
    marked = uint8_vector(place + term_bytes, vocabulary)
    for sequence in range(first, last):
        count = 0
        best = (tokens[sequence], parents[sequence], scores[sequence], edited)
        active_beams = 0 if finished[sequence] else beams
        for beam in range(active_beams):
            row = sequence * beams + beam
            row_tokens = edit_tokens[bounds[row] : bounds[row + 1]]
            for token in row_tokens:
                marked[token] = 1
            found, peak, log_sum = _search_row(logits, row, marked, best_logits, best_tokens, clean)
            for token in row_tokens:
                marked[token] = 0
            beam_score = _without_infinity(beam_scores[sequence, beam])
            terms[beam, 0], terms[beam, 1], terms[beam, 2] = beam_score, peak, log_sum
            for i in range(found):
                score = beam_score + ((best_logits[i] - peak) - log_sum)
                count = _insert(score, beam, best_tokens[i], 0, count, *best)
        for beam in range(active_beams):
            row = sequence * beams + beam
            beam_score, peak, log_sum = terms[beam, 0], terms[beam, 1], terms[beam, 2]
            for edit in range(bounds[row], bounds[row + 1]):
                token, factor = edit_tokens[edit], edit_factors[edit]
                # +inf bans the token
                if factor < np.inf:
                    logit = _without_infinity(logits[row, token])
                    score = beam_score + factor * ((logit - peak) - log_sum)
                    count = _insert(score, beam, token, 1, count, *best)
        for place in range(count, width):
            tokens[sequence, place] = NO_TOKEN
            parents[sequence, place] = NO_PARENT
            scores[sequence, place] = _LOWEST
    free_memory(memory)
    return 0


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
            scores[1 - half, own[0]], count, num_rows = 0, 0, 1
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
