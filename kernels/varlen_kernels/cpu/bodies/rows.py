"""Rows of tables, activations, norms, rotations, pooled vectors, and codes of weights, in compiled code.

Source of RMS norms: Zhang, Sennrich 2019, arXiv:1910.07467.
"""

import numpy as np

from varlen_kernels.cpu.bodies.epilogues import (
    activated,
    load_up_to,
    load_within,
    normalize_row,
    store_up_to,
    store_within,
    tanh,
)
from varlen_kernels.cpu.native.lanes import (
    largest_of,
    load,
    maximum,
    minimum,
    multiply_add,
    splat,
    store,
    sum_of,
)
from varlen_kernels.cpu.native.native import (
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.functions import NO_ACTIVATION, POOLINGS
from varlen_kernels.vector_ops import HUGE, NORM_FLOOR, SCALE_OF_HUGE

_ZERO, _ONE = np.float32(0), np.float32(1)
_CLS, _LAST, _MAX, _SUM, _MEAN, _MEAN_SQRT, _WEIGHTED_MEAN = range(len(POOLINGS))
# Added and subtracted again, it leaves the nearest whole number.
_ROUNDS = np.float32(1.5 * 2**23)
# Features whose codes are chosen together, and columns whose sums are.
_TILE, _PLACES = 2 * LANES, 4
_HUGE, _SCALE_OF_HUGE, _FLOOR = np.float32(HUGE), np.float32(SCALE_OF_HUGE), np.float32(NORM_FLOOR)


@inlined
def _divide_by_root_mean_square(matrix, row, weight, eps, out):
    """Write the RMS norm of a row into `out`, which may be `matrix`."""
    features = matrix.shape[1]
    total = splat(_ZERO)
    for column in range(0, features, LANES):
        value = load_within(matrix, row, column)
        total = multiply_add(value, value, total)
    factor = _ONE / np.sqrt(sum_of(total) / np.float32(features) + eps)
    for column in range(0, features, LANES):
        scaled = load_within(matrix, row, column) * splat(factor)
        store_within(out, row, column, scaled * load_within(weight, 0, column))


@inlined_body
def norm(
    first,
    last,
    x,  # [tokens, hidden]
    residual,  # [tokens, hidden], or [0, 0] for none
    weight,  # [1, hidden]
    bias,  # [1, hidden], or [0, 0] for none
    eps,
    is_rms,
    total,  # [tokens, hidden], gets the sum with a residual
    out,  # [tokens, hidden]
):
    """Write the norms of some rows."""
    rows = x
    if residual.shape[1]:
        for row in range(first, last):
            for column in range(0, x.shape[1], LANES):
                value = load_within(x, row, column) + load_within(residual, row, column)
                store_within(total, row, column, value)
        rows = total
    for row in range(first, last):
        if is_rms:
            _divide_by_root_mean_square(rows, row, weight, eps, out)
        else:
            normalize_row(rows, row, weight, bias, eps, out)
    return 0


@inlined
def write_rotated_head(
    source,
    row,
    column,
    head_dim,
    weight,  # [1, head_dim] of a norm before the rotation, or [0, 0] for none
    eps,
    cos_sin,  # [positions, 2 * half]
    position,
    destination,
    to_row,
    to_column,
):
    """Write a head, normed and rotated; it may be written over itself."""
    half, is_normed = cos_sin.shape[1] // 2, weight.shape[1] > 0
    factor = splat(_ONE)
    if is_normed:
        factor = splat(_factor_of(source, row, column, head_dim, eps))
    for i in range(0, half, LANES):
        count, other = half - i, half + i
        one = load_up_to(source, row, column + i, count)
        two = load_up_to(source, row, column + other, count)
        if is_normed:
            one = one * factor * load_up_to(weight, 0, i, count)
            two = two * factor * load_up_to(weight, 0, other, count)
        cos = load_up_to(cos_sin, position, i, count)
        sin = load_up_to(cos_sin, position, other, count)
        store_up_to(destination, to_row, to_column + i, one * cos - two * sin, count)
        store_up_to(destination, to_row, to_column + other, two * cos + one * sin, count)
    for i in range(2 * half, head_dim, LANES):
        value = load_up_to(source, row, column + i, head_dim - i)
        if is_normed:
            value = value * factor * load_up_to(weight, 0, i, head_dim - i)
        store_up_to(destination, to_row, to_column + i, value, head_dim - i)


@inlined
def _factor_of(source, row, column, head_dim, eps):
    """Return 1 over the root of a head's mean square."""
    total = splat(_ZERO)
    for i in range(0, head_dim, LANES):
        value = load_up_to(source, row, column + i, head_dim - i)
        total = multiply_add(value, value, total)
    return _ONE / np.sqrt(sum_of(total) / np.float32(head_dim) + eps)


@inlined_body
def rotate(
    first,
    last,
    qkv,  # [tokens, width]
    position_ids,  # [tokens]
    cos_sin,
    no_weight,
    heads,
    head_dim,
    out,  # [tokens, width]
):
    """Write the rows of some tokens, whose first heads are rotated."""
    for row in range(first, last):
        position = np.int64(position_ids[row])
        for head in range(heads):
            column, to = head * head_dim, row
            write_rotated_head(
                qkv, row, column, head_dim, no_weight, _ZERO, cos_sin, position, out, to, column
            )
        for column in range(heads * head_dim, qkv.shape[1], LANES):
            store_within(out, row, column, load_within(qkv, row, column))
    return 0


@inlined_body
def activate(
    first,
    last,
    x,  # [tokens, features], or twice the features: the second half is a factor
    bias,  # [1, features], or [0, 0] for none
    kind,
    out,  # [tokens, features]
):
    """Write the activations of some rows."""
    features = out.shape[1]
    for row in range(first, last):
        for column in range(0, features, LANES):
            # not past the last feature, which the factors follow
            value = load_up_to(x, row, column, features - column)
            if bias.shape[1]:
                value = value + load_within(bias, 0, column)
            if kind != NO_ACTIVATION:
                value = activated(value, kind)
            if x.shape[1] > features:
                value = value * load_within(x, row, features + column)
            store_within(out, row, column, value)
    return 0


@inlined_body
def stretched_tanh(
    first,
    last,
    x,
    limit,
    out,
):
    """Write limit · tanh(x / limit) of some rows."""
    for row in range(first, last):
        for column in range(0, out.shape[1], LANES):
            value = tanh(load_within(x, row, column) / splat(limit)) * splat(limit)
            store_within(out, row, column, value)
    return 0


@inlined_body
def gather(
    first,
    last,
    ids,  # [tokens]
    table,  # [rows, hidden]
    ids_2,  # [tokens], or [0] for none, as are the others
    table_2,
    ids_3,
    table_3,
    scale,  # of the first table
    out,  # [tokens, hidden]
):
    """Write the sums of rows of up to three tables."""
    factor = splat(scale)
    for row in range(first, last):
        for column in range(0, out.shape[1], LANES):
            value = load_within(table, ids[row], column)
            if len(ids_2):
                value = multiply_add(value, factor, load_within(table_2, ids_2[row], column))
                if len(ids_3):
                    value = value + load_within(table_3, ids_3[row], column)
            else:
                value = value * factor
            store_within(out, row, column, value)
    return 0


@inlined_body
def widen(first, last, x, out):
    """Write some rows in fp32."""
    for row in range(first, last):
        for column in range(0, out.shape[1], LANES):
            store_within(out, row, column, load_within(x, row, column))
    return 0


@inlined_body
def local_ids(first, last, ids, begin, count, out):
    """Write the rows of some tokens in a part of a table."""
    for i in range(first, last):
        place = np.int64(ids[i]) - begin
        out[i] = place if 0 <= place < count else count
    return 0


@inlined
def _divide_by_length(matrix, row):
    """Divide a row by its Euclidean norm."""
    features, largest, total = matrix.shape[1], splat(_ZERO), splat(_ZERO)
    for column in range(0, features, LANES):
        value = load_within(matrix, row, column)
        largest = maximum(largest, maximum(value, splat(_ZERO) - value))
    factor = _SCALE_OF_HUGE if largest_of(largest) > _HUGE else _ONE
    for column in range(0, features, LANES):
        value = load_within(matrix, row, column) * splat(factor)
        total = multiply_add(value, value, total)
    length = max(np.sqrt(sum_of(total)), _FLOOR)
    for column in range(0, features, LANES):
        value = load_within(matrix, row, column) * splat(factor)
        store_within(matrix, row, column, value / splat(length))


@inlined_body
def pool(
    first,
    last,
    x,  # [tokens, hidden]
    cu_seqlens,
    normalize,  # [sequences], or [0] for none
    unpooled_lengths,  # [sequences], or [0] for none
    rows,  # rows of x that are pooled, or [0] for all
    mode,
    out,  # [sequences, hidden]
):
    """Write the vectors of some sequences."""
    for sequence in range(first, last):
        begin, end = np.int64(cu_seqlens[sequence]), np.int64(cu_seqlens[sequence + 1])
        start, stop = begin, end
        if unpooled_lengths.shape[0]:
            start = min(end, begin + np.int64(unpooled_lengths[sequence]))
        if mode == _CLS:
            # the first of all where none is left
            start = start if start < end else begin
            stop = min(end, start + 1)
        elif mode == _LAST:
            start = max(start, end - 1)
        weight = stop - start
        if mode == _WEIGHTED_MEAN:
            # the sum of their places
            weight = weight * (start + stop - 2 * begin + 1) // 2
        divisor = np.float32(weight) if weight and mode >= _MEAN else _ONE
        if mode == _MEAN_SQRT:
            divisor = np.sqrt(divisor)
        # of no token, the maximum of a sequence
        least = np.float32(-np.inf) if mode == _MAX and begin < end else _ZERO
        for column in range(0, out.shape[1], LANES):
            total = splat(least)
            for token in range(start, stop):
                row = np.int64(rows[token]) if rows.shape[0] else token
                value = load_within(x, row, column)
                factor = np.float32(token - begin + 1) if mode == _WEIGHTED_MEAN else _ONE
                added = multiply_add(splat(factor), value, total)
                total = maximum(total, value) if mode == _MAX else added
            store_within(out, sequence, column, total / splat(divisor))
        if normalize.shape[0] and normalize[sequence]:
            _divide_by_length(out, sequence)
    return 0


@inlined_body
def choose_codes(
    first,
    last,
    weight,  # [features, hidden]
    scale,
    columns,  # in the order in which they get codes
    shares,  # [columns, columns], of the errors of columns before a row
    largest,
    codes,  # [features, hidden]
):
    """Write the codes of some features."""
    count, low, high = columns.shape[0], splat(-largest), splat(largest)
    memory = new_memory(4 * (count + _PLACES + 2) * _TILE)
    if memory == 0:
        return 1
    # in steps of a code; then what four columns correct, the codes of one, and the scale
    errors = fp32_matrix(memory, count + _PLACES + 2, _TILE)
    for begin in range(first, last, _TILE):
        end = min(_TILE, last - begin)
        for i in range(_TILE):
            errors[count + 5, i] = scale[begin + min(i, end - 1)]
        for known in range(0, count, _PLACES):
            after = min(known + _PLACES, count)
            for place in range(known, after):
                column = np.int64(columns[place])
                for i in range(_TILE):
                    errors[place, i] = weight[begin + min(i, end - 1), column]
            # sums of four columns read an error once, and do not wait for each other
            a = b = c = d = e = f = g = h = splat(_ZERO)
            for before in range(known):
                x, y = load(errors, before, 0), load(errors, before, LANES)
                share = splat(shares[known, before])
                a, b = multiply_add(share, x, a), multiply_add(share, y, b)
                share = splat(shares[min(known + 1, count - 1), before])
                c, d = multiply_add(share, x, c), multiply_add(share, y, d)
                share = splat(shares[min(known + 2, count - 1), before])
                e, f = multiply_add(share, x, e), multiply_add(share, y, f)
                share = splat(shares[min(known + 3, count - 1), before])
                g, h = multiply_add(share, x, g), multiply_add(share, y, h)
            store(errors, count, 0, a)
            store(errors, count, LANES, b)
            store(errors, count + 1, 0, c)
            store(errors, count + 1, LANES, d)
            store(errors, count + 2, 0, e)
            store(errors, count + 2, LANES, f)
            store(errors, count + 3, 0, g)
            store(errors, count + 3, LANES, h)
            for place in range(known, after):
                for i in range(0, _TILE, LANES):
                    total = load(errors, count + place - known, i)
                    for before in range(known, place):
                        share = splat(shares[place, before])
                        total = multiply_add(share, load(errors, before, i), total)
                    exact = load(errors, place, i) / load(errors, count + 5, i)
                    goal = minimum(maximum(exact + total, low), high)
                    code = goal + splat(_ROUNDS) - splat(_ROUNDS)
                    store(errors, count + 4, i, code)
                    store(errors, place, i, exact - code)
                column = np.int64(columns[place])
                for i in range(end):
                    codes[begin + i, column] = np.int8(errors[count + 4, i])
    free_memory(memory)
    return 0
