"""One step of beam search on a CPU, compiled by numba.

A row of logits is read once from memory, in chunks that stay in the cache of a core. A chunk is searched for its
maximum, summed as exponentials, and searched for logits above the floor, which is the worst of the best logits so far.
Few logits of a row are above it, and nothing is sorted.
Source: the specification is `reference.beam`.
"""

import math

import numpy as np

from varlen_kernels.cpu.native import (
    aligned,
    clear,
    fp32_matrix,
    fp32_vector,
    free_memory,
    inlined,
    int32_vector,
    new_memory,
    uint8_vector,
)
from varlen_kernels.reference.beam import NO_PARENT, NO_TOKEN

_CHUNK = 2048
# Adjacent logits that are compared with the floor at once.
_GROUP = 64
# Running maxima of a chunk: several registers, because a maximum waits for the one before.
_LANES = 64
_LARGEST = np.float32(np.finfo(np.float32).max)
_LOWEST = np.float32(-np.inf)
_LOG2_E = np.float32(math.log2(math.e))
# 2 ** x below this is no normal number; beside the 1 of the maximum it is 0.
_LEAST_EXPONENT = np.float32(-126.0)
_HALF = np.float32(0.5)
# Taylor series of 2 ** x: the rest is below 1e-8 for |x| <= 1/2.
_SERIES = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(8))


@inlined
def _without_infinity(x):
    """Return x, and the largest finite number instead of +inf."""
    return min(x, _LARGEST)


@inlined
def _maximum(x, lanes):
    """Return the maximum; NaN counts as -inf."""
    for lane in range(_LANES):
        lanes[lane] = _LOWEST
    whole = len(x) // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for lane in range(_LANES):
            value = x[start + lane]
            lanes[lane] = max(lanes[lane], value)
    largest = _LOWEST
    for lane in range(_LANES):
        largest = max(largest, lanes[lane])
    for i in range(whole, len(x)):
        largest = max(largest, x[i])
    return largest


# additions in any order, so that they are vectorized; NaN and infinities keep their meaning
@inlined(fastmath={"reassoc", "contract", "nsz"})
def _sum_exp(x, peak, mantissas, exponents, powers):
    """Return the sum of exp(x - peak); NaN and -inf count as 0.

    Args:
        x: numbers, at most _CHUNK, that are not above `peak`.
        mantissas: [_CHUNK] fp32, overwritten.
        exponents, powers: [_CHUNK] int32 and fp32, the same memory, overwritten.
    """
    for i in range(len(x)):
        power = (x[i] - peak) * _LOG2_E
        # NaN is not above any number
        power = max(_LEAST_EXPONENT, power)
        whole = np.int32(power - _HALF)
        f = power - np.float32(whole)
        series = _SERIES[7] * f + _SERIES[6]
        series = series * f + _SERIES[5]
        series = series * f + _SERIES[4]
        series = series * f + _SERIES[3]
        series = series * f + _SERIES[2]
        series = series * f + _SERIES[1]
        mantissas[i] = series * f + _SERIES[0]
        # the bits of 2 ** whole
        exponents[i] = (whole + np.int32(127)) << np.int32(23)
    total = np.float32(0.0)
    for i in range(len(x)):
        total += mantissas[i] * powers[i]
    return total


@inlined
def _search_group(
    x,  # [at most _GROUP]
    first_token,
    edited,  # [vocabulary] bytes
    floor,
    found,
    best_logits,  # [width], sorted
    best_tokens,  # [width]
):
    """Insert logits above `floor` into the best; return their number and the floor."""
    width = len(best_logits)
    for i in range(len(x)):
        # an equal logit of a higher token is worse
        if x[i] > floor and edited[first_token + i] == 0:
            place = min(found, width - 1)
            while place > 0 and best_logits[place - 1] < x[i]:
                best_logits[place] = best_logits[place - 1]
                best_tokens[place] = best_tokens[place - 1]
                place -= 1
            best_logits[place], best_tokens[place] = x[i], first_token + i
            found = min(found + 1, width)
            if found == width:
                floor = best_logits[width - 1]
    return found, floor


@inlined
def _search_row(
    logits,  # [vocabulary]
    edited,  # [vocabulary] bytes, tokens to leave out of the search
    best_logits,  # [width], overwritten
    best_tokens,  # [width], overwritten
    buffers,
):
    """Write the best logits of a row in order.

    Return their number, the row's maximum, and log Σ exp(logit - maximum); 0 for a row of only -inf.
    """
    lanes, clean, mantissas, exponents, powers = buffers
    found, peak, total, floor = 0, _LOWEST, 0.0, _LOWEST
    for start in range(0, len(logits), _CHUNK):
        x = logits[start : start + _CHUNK]
        largest = _maximum(x, lanes)
        if largest > _LARGEST:
            for i in range(len(x)):
                clean[i] = _without_infinity(x[i])
            x, largest = clean[: len(x)], _LARGEST
        if largest > peak:
            # what was summed with a smaller maximum counts less
            total *= math.exp(peak - largest)
            peak = largest
        if peak > _LOWEST:
            total += _sum_exp(x, peak, mantissas, exponents, powers)
        if not largest > floor:
            continue
        for first in range(0, len(x), _GROUP):
            group = x[first : first + _GROUP]
            above = 0
            for i in range(len(group)):
                above += group[i] > floor
            if above > 0:
                found, floor = _search_group(
                    group, start + first, edited, floor, found, best_logits, best_tokens
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


@inlined
def step_sequences(
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
    lane_bytes, chunk_bytes, width_bytes = 4 * _LANES, 4 * _CHUNK, aligned(4 * width)
    term_bytes, marked_bytes = aligned(12 * beams), aligned(vocabulary)
    memory = new_memory(lane_bytes + 3 * chunk_bytes + 3 * width_bytes + term_bytes + marked_bytes)
    if memory == 0:
        return 1
    chunks = memory + lane_bytes
    exponents = chunks + 2 * chunk_bytes
    buffers = (
        fp32_vector(memory, _LANES),
        fp32_vector(chunks, _CHUNK),
        fp32_vector(chunks + chunk_bytes, _CHUNK),
        int32_vector(exponents, _CHUNK),
        fp32_vector(exponents, _CHUNK),
    )
    place = exponents + chunk_bytes
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
            found, peak, log_sum = _search_row(
                logits[row], marked, best_logits, best_tokens, buffers
            )
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
