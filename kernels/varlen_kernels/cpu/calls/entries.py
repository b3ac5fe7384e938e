"""Functions that `calls` runs: each works on some units of an op.

They read their arguments from memory (`arguments`). The comments of a function name its tensors, its constants and its
unit. It returns 0, or 1 if it had too little memory. `machine_code` compiles and loads them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from varlen_kernels.cpu.bodies.attention import attend_items, attend_items_with_distances
from varlen_kernels.cpu.bodies.beam import step_sequences
from varlen_kernels.cpu.bodies.beam_search import advance_some_searches, follow_some_beams
from varlen_kernels.cpu.bodies.epilogues import (
    NO_ACTIVATION,
    activated,
    load_up_to,
    load_within,
    store_within,
)
from varlen_kernels.cpu.bodies.heads import write_rotated_head
from varlen_kernels.cpu.bodies.int8_panels import multiply_int8_units
from varlen_kernels.cpu.bodies.int8_rows import dequantize_some_rows, quantize_some_rows
from varlen_kernels.cpu.bodies.kv_blocks import append_rows, copy_some_blocks
from varlen_kernels.cpu.bodies.logit_edits import edit_some_rows
from varlen_kernels.cpu.bodies.norms import norm_some_rows
from varlen_kernels.cpu.bodies.paged import attend_tokens
from varlen_kernels.cpu.bodies.paged_chunks import attend_chunks
from varlen_kernels.cpu.bodies.panels import multiply_units
from varlen_kernels.cpu.bodies.ranks import join_columns, sum_numbers
from varlen_kernels.cpu.bodies.sampling import sample_rows
from varlen_kernels.cpu.calls.arguments import (
    address,
    bias_of_heads,
    bit_rows,
    bytes_of,
    cache_of,
    codes_of,
    columns_of,
    count_of,
    fp32,
    fp32_number,
    fp32_numbers,
    fp32_row,
    fp64_numbers,
    id_rows,
    ids_of,
    long_ids_of,
    matrix_of,
    number,
    row_of,
    rows_of,
)
from varlen_kernels.cpu.calls.call_code import run_alone, run_shared
from varlen_kernels.cpu.native.lanes import multiply_add, splat
from varlen_kernels.cpu.native.native import (
    bf16_matrix,
    fp32_matrix,
    inlined,
    int8_matrix,
    int32_matrices,
    int32_matrix,
    uint8_matrix,
)
from varlen_kernels.cpu.native.target_cpu import LANES


@inlined
def step_beams(arguments, first, last):
    """Write the best candidates of some sequences."""
    # logits, scores, finished, bounds of the edits of rows, their tokens and factors, tokens, parents, scores; a unit
    # is a sequence
    return step_sequences(
        first,
        last,
        fp32(arguments, 0),
        fp32(arguments, 1),
        bytes_of(arguments, 2),
        long_ids_of(arguments, 3),
        ids_of(arguments, 4),
        fp32_numbers(arguments, 5),
        id_rows(arguments, 6),
        id_rows(arguments, 7),
        fp32(arguments, 8),
    )


@inlined
def follow_beams(arguments, first, last):
    """Give the beams of some searches their tokens and block tables."""
    # searches, places, given, context_lens, cu_blocks; tables, parents, tokens, token_ids, block_ids, slots, copies;
    # block_size; a unit is a search
    count = columns_of(arguments, 6)
    blocks = columns_of(arguments, 5) // count
    return follow_some_beams(
        first,
        last,
        id_rows(arguments, 0),
        ids_of(arguments, 1),
        id_rows(arguments, 2),
        ids_of(arguments, 3),
        ids_of(arguments, 4),
        int32_matrices(address(arguments, 5), 2, count, blocks),
        id_rows(arguments, 6),
        id_rows(arguments, 7),
        ids_of(arguments, 8),
        ids_of(arguments, 9),
        long_ids_of(arguments, 10),
        id_rows(arguments, 11),
        number(arguments, 36),
    )


@inlined
def advance_searches(arguments, first, last):
    """Choose the beams and the answers of some searches."""
    # tokens, log probabilities, searches, places, divisors, ends; parents, tokens, scores, answers, answer_scores,
    # num_answers; heads; ends, beams, scores; a unit is a search
    return advance_some_searches(
        first,
        last,
        id_rows(arguments, 0),
        fp32(arguments, 1),
        id_rows(arguments, 2),
        ids_of(arguments, 3),
        fp32(arguments, 4),
        ids_of(arguments, 5),
        id_rows(arguments, 6),
        id_rows(arguments, 7),
        fp32(arguments, 8),
        int32_matrices(address(arguments, 9), 2, columns_of(arguments, 6), 3),
        fp32(arguments, 10),
        id_rows(arguments, 11),
        ids_of(arguments, 12),
        id_rows(arguments, 13),
        id_rows(arguments, 14),
        fp32_numbers(arguments, 15),
    )


# numba's function of whole numbers. An op's function gets the address of its arguments, its first unit, and the one
# after its last.
Entry: TypeAlias = Any


def _multiply(view: Any) -> Entry:
    # x, panels, bias, out; the activation; a unit is a panel of a block of rows
    matrix, row = matrix_of(view), row_of(view)

    @inlined
    def multiply(arguments, first, last):
        return multiply_units(
            first,
            last,
            matrix(arguments, 0),
            matrix(arguments, 1),
            row(arguments, 2),
            number(arguments, 12),
            matrix(arguments, 3),
        )

    return multiply


def _multiply_codes(view: Any) -> Entry:
    # x, panels, scale, fp32_rows, outliers, out; the largest code, the activation; a unit is a panel of a block of rows
    codes = matrix_of(view)

    @inlined
    def multiply(arguments, first, last):
        return multiply_int8_units(
            first,
            last,
            fp32(arguments, 0),
            codes(arguments, 1),
            fp32_row(arguments, 2),
            fp32(arguments, 3),
            long_ids_of(arguments, 4),
            number(arguments, 18),
            number(arguments, 19),
            fp32(arguments, 5),
        )

    return multiply


@inlined
def _quantize(arguments, first, last):
    # x, outliers, codes, factors; the largest code, the lowest code; a unit is a row
    return quantize_some_rows(
        first,
        last,
        fp32(arguments, 0),
        long_ids_of(arguments, 1),
        number(arguments, 12),
        number(arguments, 13),
        codes_of(arguments, 2),
        fp32(arguments, 3),
    )


def _dequantize(view: Any) -> Entry:
    # sums, factors, scale, fp32_rows, out; a unit is a row
    sums = matrix_of(view)

    @inlined
    def dequantize(arguments, first, last):
        dequantize_some_rows(
            first,
            last,
            sums(arguments, 0),
            fp32(arguments, 1),
            fp32_row(arguments, 2),
            fp32(arguments, 3),
            fp32(arguments, 4),
        )
        return 0

    return dequantize


def _norm(view: Any) -> Entry:
    # x, residual, weight, bias, total, out; eps, whether it is an RMS norm; a unit is a row
    matrix, row = matrix_of(view), row_of(view)

    @inlined
    def norm(arguments, first, last):
        norm_some_rows(
            first,
            last,
            matrix(arguments, 0),
            matrix(arguments, 1),
            row(arguments, 2),
            row(arguments, 3),
            fp32_number(arguments, 18),
            number(arguments, 19) != 0,
            matrix(arguments, 4),
            matrix(arguments, 5),
        )
        return 0

    return norm


def _activate(view: Any) -> Entry:
    # x, bias, out; the activation; a unit is a row. The second half of a row of x, if it has one, is a factor.
    matrix, as_row = matrix_of(view), row_of(view)

    @inlined
    def activate(arguments, first, last):
        x, bias, out = matrix(arguments, 0), as_row(arguments, 1), matrix(arguments, 2)
        kind, features = number(arguments, 9), out.shape[1]
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

    return activate


def _gather(view: Any) -> Entry:
    # ids, table, ids, table, ids, table, out; the scale of the first; a unit is a row of out
    matrix = matrix_of(view)

    @inlined
    def gather(arguments, first, last):
        ids, table = ids_of(arguments, 0), matrix(arguments, 1)
        ids_2, table_2 = ids_of(arguments, 2), matrix(arguments, 3)
        ids_3, table_3 = ids_of(arguments, 4), matrix(arguments, 5)
        out, scale = matrix(arguments, 6), splat(fp32_number(arguments, 21))
        for row in range(first, last):
            for column in range(0, out.shape[1], LANES):
                value = load_within(table, ids[row], column)
                if len(ids_2):
                    value = multiply_add(value, scale, load_within(table_2, ids_2[row], column))
                    if len(ids_3):
                        value = value + load_within(table_3, ids_3[row], column)
                else:
                    value = value * scale
                store_within(out, row, column, value)
        return 0

    return gather


def _append(view: Any) -> Entry:
    # qkv, slots, keys, values, position_ids, cos_sin, query_weight, key_weight, out; heads, key heads, tokens of a
    # block, head_dim, eps; a unit is a token
    matrix, cache, row = matrix_of(view), cache_of(view), row_of(view)

    @inlined
    def append(arguments, first, last):
        head_dim = number(arguments, 30)
        append_rows(
            first,
            last,
            matrix(arguments, 0),
            long_ids_of(arguments, 1),
            cache(arguments, 2, head_dim),
            cache(arguments, 3, head_dim),
            ids_of(arguments, 4),
            fp32(arguments, 5),
            row(arguments, 6),
            row(arguments, 7),
            number(arguments, 27),
            number(arguments, 28),
            number(arguments, 29),
            fp32_number(arguments, 31),
            matrix(arguments, 8),
        )
        return 0

    return append


def _attend_blocks(attend_some: Any, view: Any) -> Entry:
    # qkv, keys, values, cu_seqlens, context_lens, block_ids, cu_blocks, bias, out; heads, key heads, tokens of a block,
    # head_dim, scale, window; a unit is a key head of a sequence
    matrix, cache = matrix_of(view), cache_of(view)

    @inlined
    def attend(arguments, first, last):
        num_heads, num_kv_heads = number(arguments, 27), number(arguments, 28)
        block_size, head_dim = number(arguments, 29), number(arguments, 30)
        return attend_some(
            first,
            last,
            matrix(arguments, 0),
            cache(arguments, 1, head_dim),
            cache(arguments, 2, head_dim),
            num_kv_heads,
            block_size,
            ids_of(arguments, 3),
            ids_of(arguments, 4),
            ids_of(arguments, 5),
            ids_of(arguments, 6),
            bias_of_heads(arguments, 7, num_heads),
            fp32_number(arguments, 31),
            number(arguments, 32),
            matrix(arguments, 8),
        )

    return attend


@inlined
def _copy_blocks(arguments, first, last):
    # memory, copies; bytes of a block, and of a cache; a unit is a cache
    block_bytes, cache_bytes = number(arguments, 6), number(arguments, 7)
    for cache in range(first, last):
        place = address(arguments, 0) + cache * cache_bytes
        copy_some_blocks(place, id_rows(arguments, 1), block_bytes)
    return 0


def _attend(view: Any) -> Entry:
    # qkv, cu_seqlens, bias, key_lengths, out; heads, key heads, scale, causal, window; a unit is a key head of a
    # sequence
    matrix = matrix_of(view)

    @inlined
    def attend(arguments, first, last):
        return attend_items(
            first,
            last,
            matrix(arguments, 0),
            ids_of(arguments, 1),
            bias_of_heads(arguments, 2, number(arguments, 15)),
            ids_of(arguments, 3),
            number(arguments, 16),
            fp32_number(arguments, 17),
            number(arguments, 18) != 0,
            number(arguments, 19),
            matrix(arguments, 4),
        )

    return attend


def _attend_distances(view: Any) -> Entry:
    # qkv, cu_seqlens, bias, rows, keys and queries of distances, key_lengths, out; heads, scale, causal, window; a unit
    # is a head of a sequence, ordered by head
    matrix = matrix_of(view)

    @inlined
    def attend(arguments, first, last):
        num_heads = number(arguments, 24)
        tables = ids_of(arguments, 3), matrix(arguments, 4), matrix(arguments, 5)
        return attend_items_with_distances(
            first,
            last,
            tables,
            matrix(arguments, 0),
            ids_of(arguments, 1),
            bias_of_heads(arguments, 2, num_heads),
            ids_of(arguments, 6),
            num_heads,
            fp32_number(arguments, 25),
            number(arguments, 26) != 0,
            number(arguments, 27),
            matrix(arguments, 7),
        )

    return attend


def _rotate(view: Any) -> Entry:
    # qkv, position_ids, cos_sin, no weight, out; rotated heads, head_dim; a unit is a token
    matrix, as_row = matrix_of(view), row_of(view)

    @inlined
    def rotate(arguments, first, last):
        qkv, ids, cos_sin = matrix(arguments, 0), ids_of(arguments, 1), fp32(arguments, 2)
        no_weight, out = as_row(arguments, 3), matrix(arguments, 4)
        heads, head_dim, width = number(arguments, 15), number(arguments, 16), qkv.shape[1]
        for row in range(first, last):
            for head in range(heads):
                column = head * head_dim
                write_rotated_head(
                    qkv,
                    row,
                    column,
                    head_dim,
                    no_weight,
                    np.float32(0),
                    cos_sin,
                    np.int64(ids[row]),
                    out,
                    row,
                    column,
                )
            for column in range(heads * head_dim, width, LANES):
                store_within(out, row, column, load_within(qkv, row, column))
        return 0

    return rotate


@inlined
def _sample(arguments, first, last):
    # logits, temperature, top_k, top_p, min_p, uniform, out; a unit is a row
    return sample_rows(
        first,
        last,
        fp32(arguments, 0),
        bit_rows(arguments, 0),
        fp32_numbers(arguments, 1),
        ids_of(arguments, 2),
        fp32_numbers(arguments, 3),
        fp32_numbers(arguments, 4),
        fp64_numbers(arguments, 5),
        ids_of(arguments, 6),
    )


@inlined
def _edit_logits(arguments, first, last):
    # token_ids, logit_rows, rows, penalties, tokens, counts and biases of the host; logits, tokens, counts, biases,
    # sizes; a unit is an edited row
    return edit_some_rows(
        first,
        last,
        ids_of(arguments, 0),
        ids_of(arguments, 1),
        id_rows(arguments, 2),
        fp32(arguments, 3),
        ids_of(arguments, 4),
        ids_of(arguments, 5),
        fp32_numbers(arguments, 6),
        fp32(arguments, 7),
        id_rows(arguments, 8),
        id_rows(arguments, 9),
        fp32(arguments, 10),
        ids_of(arguments, 11),
    )


def _all_reduce(view: Any) -> Entry:
    # x, memory of the ranks, out; rank, number of ranks; one unit
    item_bytes = 4 if view is fp32_matrix else 2

    @inlined
    def all_reduce(arguments, first, last):
        if first == last:
            return 0
        return sum_numbers(
            view,
            item_bytes,
            address(arguments, 0),
            address(arguments, 1),
            number(arguments, 9),
            number(arguments, 10),
            count_of(arguments, 0),
            address(arguments, 2),
        )

    return all_reduce


def _gather_columns(view: Any) -> Entry:
    # x, memory of the ranks, out; rank, number of ranks; one unit
    item_bytes = 4 if view is fp32_matrix else 2

    @inlined
    def gather_columns(arguments, first, last):
        if first == last:
            return 0
        return join_columns(
            item_bytes,
            address(arguments, 0),
            address(arguments, 1),
            number(arguments, 9),
            number(arguments, 10),
            rows_of(arguments, 0),
            columns_of(arguments, 0),
            columns_of(arguments, 2),
            address(arguments, 2),
        )

    return gather_columns


@inlined
def _local_ids(arguments, first, last):
    # ids, out; the first token of a part, the number of its tokens; a unit is a token
    ids, out = ids_of(arguments, 0), ids_of(arguments, 1)
    begin, count = number(arguments, 6), number(arguments, 7)
    for i in range(first, last):
        place = np.int64(ids[i]) - begin
        out[i] = place if 0 <= place < count else count
    return 0


@inlined
def _run_shared(table, rows, columns, counts, stay, spent):
    # see call_code.run_shared
    run_shared(table, rows, columns, counts, stay, spent)
    return 0


@inlined
def _run_alone(table, rows, columns):
    # see call_code.run_alone
    return run_alone(table, rows, columns)


# Of ops in fp32 and bf16: the same function for another type, by name.
_IN_BOTH_DTYPES: Mapping[str, Callable[[Any], Entry]] = {
    "multiply": _multiply,
    "norm": _norm,
    "activate": _activate,
    "gather": _gather,
    "append": _append,
    "attend_tokens": partial(_attend_blocks, attend_tokens),
    "attend_chunks": partial(_attend_blocks, attend_chunks),
    "attend": _attend,
    "attend_distances": _attend_distances,
    "all_reduce": _all_reduce,
    "gather_columns": _gather_columns,
    "rotate": _rotate,
}
# What makes the function of each name.
MAKERS: Mapping[str, Callable[[], Entry]] = {
    **{name: partial(make, fp32_matrix) for name, make in _IN_BOTH_DTYPES.items()},
    **{f"{name}_bf16": partial(make, bf16_matrix) for name, make in _IN_BOTH_DTYPES.items()},
    "multiply_int8": partial(_multiply_codes, int8_matrix),
    "multiply_int4": partial(_multiply_codes, uint8_matrix),
    "copy_blocks": lambda: _copy_blocks,
    "local_ids": lambda: _local_ids,
    "quantize": lambda: _quantize,
    "dequantize": partial(_dequantize, fp32_matrix),
    "dequantize_int32": partial(_dequantize, int32_matrix),
    "step_beams": lambda: step_beams,
    "follow_beams": lambda: follow_beams,
    "advance_searches": lambda: advance_searches,
    "sample": lambda: _sample,
    "edit_logits": lambda: _edit_logits,
    "run_shared": lambda: _run_shared,
    "run_alone": lambda: _run_alone,
}
