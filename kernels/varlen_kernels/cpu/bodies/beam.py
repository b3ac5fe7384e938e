"""One step of beam search on a CPU, compiled by numba.

A row of logits is read once from memory, in chunks that stay in the cache of a core. A chunk is searched for its
maximum, summed as exponentials, and searched for logits above the floor, which is the worst of the best logits so far.
Few logits of a row are above it, and nothing is sorted.
Source: the specification is `reference.beam`.
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
from varlen_kernels.reference.beam import NO_PARENT, NO_TOKEN

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
