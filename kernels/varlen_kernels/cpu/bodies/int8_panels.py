"""Linear layers in int8 with what follows them, compiled by numba.

Tokens become codes once, and sums of a panel become results while they are in registers and the first-level cache:
scales, outliers, bias and activation cost no pass over memory.

A tile is a few rows by a panel of features, whose sums fill the registers. With VNNI it is 6 rows by 64 features: 24
vectors of sums, and what they are computed from, fill the 32 registers of AVX-512. Each instruction multiplies 64 pairs
of codes and adds fours of products to sums of 32 bits, exactly.

With AMX tiles are as in `panels`, and the sums are the same.

With AVX2 it is 4 rows by 16 features in 16 registers. An instruction multiplies 32 pairs and adds twos of products in
16 bits, which is exact for row codes of 7 bits: 2 · 127 · 127 is less than 2 ** 15. Another one adds these sums in 32
bits.

Codes of 4 bits are two in a byte, and become bytes in registers: memory gives half as many of them.
"""

from collections.abc import Sequence
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.bodies.epilogues import activate_vector, load_within, store_within
from varlen_kernels.cpu.bodies.int8_layout import DEPTH, TILE_FEATURES, TILE_ROWS, WIDTH
from varlen_kernels.cpu.bodies.panels import (
    SUM_ROWS,
    add_to_tiles,
    begin_tiles,
    end_tiles,
    fetch_step,
    fetch_tile,
    place_of,
    tiles_of,
)
from varlen_kernels.cpu.native.lanes import (
    LANES_TYPE,
    element_address,
    largest_of,
    load,
    maximum,
    minimum,
    moved,
    multiply_add,
    number_at,
    repeated,
    select_greater,
    smallest_of,
    splat,
    sum_of,
)
from varlen_kernels.cpu.native.native import (
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    int32_matrix,
    new_memory,
    uint8_matrix,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.cpu.native.tiles import (
    HAS_TILES,
    ROW_BYTES,
    configure_tiles,
    release_tiles,
)
from varlen_kernels.functions import BLOCK, NO_ACTIVATION
from varlen_kernels.reference.linear_int8 import OUTLIERS, SMALLEST_SCALE

_BYTE, _INT, _SIZE = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES, _INTS = ir.VectorType(_BYTE, LANES), ir.VectorType(_INT, LANES)
_DOT_PRODUCT = "llvm.x86.avx512.vpdpbusd.512"
# Of 32 codes with 32 others, in twos; and of 16 sums of 16 bits, in twos.
_PAIR_PRODUCT, _PAIR_SUM = "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"
_HALF_BYTES, _HALF_INTS = ir.VectorType(_BYTE, 32), ir.VectorType(_INT, 8)
_SHORTS = ir.VectorType(ir.IntType(16), 16)


_VECTORS = TILE_FEATURES // WIDTH
_SUMS = ir.VectorType(_INT, WIDTH)
# Bytes of sums of a block.
_SUM_BYTES = 4 * SUM_ROWS * TILE_FEATURES
# Parts in which sums of two tiles become results.
_PARTS = 2 * (TILE_FEATURES // LANES)


def _multiply(count: int) -> Any:
    """Return a function for compiled code that multiplies this number of rows with a panel."""

    @numba.extending.intrinsic
    def multiply(_context, codes, _row, panels, _panel, sums):
        def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
            from_codes, row, from_panels, panel, to_sums = values
            codes_type, panels_type, sums_type = (declared.args[i] for i in (0, 2, 4))
            zero = _SIZE(0)

            def row_address(kind: Any, array: Any, first: Any, i: int) -> Any:
                place = builder.add(first, _SIZE(i))
                return element_address(context, builder, kind, array, place, zero)

            rows = [row_address(codes_type, from_codes, row, i) for i in range(count)]
            weights = element_address(context, builder, panels_type, from_panels, panel, zero)
            shape = context.make_array(panels_type)(context, builder, from_panels).shape
            step_bytes = _SIZE(TILE_FEATURES * DEPTH)
            steps = builder.udiv(cgutils.unpack_tuple(builder, shape, 2)[1], step_bytes)
            totals = [
                [cgutils.alloca_once(builder, _SUMS) for _ in range(_VECTORS)] for _ in range(count)
            ]
            for total in (each for of_row in totals for each in of_row):
                builder.store(_SUMS(None), total)
            # of 4 bits, two in a byte
            halves = (0, 1) if panels_type.dtype == types.uint8 else ()
            with cgutils.for_range(builder, steps) as loop:
                first = builder.mul(loop.index, step_bytes)
                factors = _load_factors(builder, weights, first)
                step_columns = _SIZE(DEPTH * max(1, len(halves)))
                column = builder.mul(loop.index, step_columns)
                if not halves:
                    _add_products(builder, rows, column, factors, totals)
                for half in halves:
                    codes = [_half_of_bytes(builder, factor, half) for factor in factors]
                    place = builder.add(column, _SIZE(DEPTH * half))
                    _add_products(builder, rows, place, codes, totals)
            for i, of_row in enumerate(totals):
                address = row_address(sums_type, to_sums, zero, i)
                for j, total in enumerate(of_row):
                    place = moved(builder, address, _SIZE(4 * WIDTH * j), _SUMS)
                    builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        arguments = (codes, types.int64, panels, types.int64, sums)
        return types.none(*arguments), generate

    return multiply


# multiply_rows(codes, row, panels, panel, sums) writes the products of TILE_ROWS rows of codes, from `row` on, with a
# panel of `pack_panels` or `pack_halves`: `[TILE_ROWS, TILE_FEATURES]` int32. Codes are `[rows, columns]` uint8, with
# at least as many columns as the panel. multiply_row and multiply_pair are for one and two rows.
multiply_row, multiply_pair, multiply_rows = (_multiply(count) for count in (1, 2, TILE_ROWS))


def _load_factors(builder: Any, weights: Any, first: Any) -> list[Any]:
    """Return vectors of a panel from an offset on, for a tile's features."""
    factors = []
    for i in range(_VECTORS):
        offset = builder.add(first, _SIZE(4 * WIDTH * i))
        factors.append(builder.load(moved(builder, weights, offset, _SUMS), align=4))
    return factors


def _half_of_bytes(builder: Any, vector: Any, half: int) -> Any:
    """Return the codes in one half of each byte: 0 is the lower one."""
    kind = ir.VectorType(_BYTE, 4 * WIDTH)

    def splat_byte(number: int) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    both = builder.bitcast(vector, kind)
    one = builder.lshr(both, splat_byte(4)) if half else builder.and_(both, splat_byte(15))
    return builder.bitcast(builder.sub(one, splat_byte(8)), _SUMS)


def _add_products(
    builder: Any,
    rows: Sequence[Any],
    column: Any,
    factors: Sequence[Any],
    totals: Sequence[Sequence[Any]],
) -> None:
    """Add the products of four columns to the sums.

    Args:
        rows, totals: addresses of rows of codes, and of vectors of sums by row.
        factors: vectors of the columns' weights.
    """
    for address, of_row in zip(rows, totals, strict=True):
        four = builder.load(moved(builder, address, column, _INT), align=1)
        codes = repeated(builder, four, WIDTH)
        for factor, total in zip(factors, of_row, strict=True):
            added = _add_fours(builder, builder.load(total), codes, factor)
            builder.store(added, total)


def _add_fours(builder: Any, total: Any, codes: Any, weights: Any) -> Any:
    """Return sums plus fours of products."""

    def call(name: str, result: Any, *values: Any) -> Any:
        function_type = ir.FunctionType(result, [value.type for value in values])
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        return builder.call(function, values)

    if WIDTH == LANES:
        return call(_DOT_PRODUCT, _SUMS, total, codes, weights)
    pairs = call(
        _PAIR_PRODUCT,
        _SHORTS,
        builder.bitcast(codes, _HALF_BYTES),
        builder.bitcast(weights, _HALF_BYTES),
    )
    ones = _SHORTS([1] * 16)
    return builder.add(total, call(_PAIR_SUM, _HALF_INTS, pairs, ones))


@numba.extending.intrinsic
def has_halves(_context, panels):
    """Return whether codes have 4 bits, two in a byte."""

    def generate(_context: Any, _builder: Any, declared: Any, _values: Any) -> Any:
        return ir.Constant(ir.IntType(1), declared.args[0].dtype == types.uint8)

    return types.boolean(panels), generate


@numba.extending.intrinsic
def widen_halves(_context, panels, _panel, widened):
    """Write the codes of 4 bits of a panel as `pack_panels` orders bytes."""

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        from_panels, panel, to = values
        zero = _SIZE(0)

        def address(number: int, array: Any, row: Any) -> Any:
            return element_address(context, builder, declared.args[number], array, row, zero)

        halves, codes = address(0, from_panels, panel), address(2, to, zero)
        shape = context.make_array(declared.args[2])(context, builder, to).shape
        row_bytes = TILE_FEATURES * DEPTH
        rows = builder.udiv(cgutils.unpack_tuple(builder, shape, 2)[1], _SIZE(2 * row_bytes))
        with cgutils.for_range(builder, rows) as loop:
            place = builder.mul(loop.index, _SIZE(row_bytes))
            for i, factor in enumerate(_load_factors(builder, halves, place)):
                for half in (0, 1):
                    begin = half * row_bytes + 4 * WIDTH * i
                    at = builder.add(builder.mul(place, _SIZE(2)), _SIZE(begin))
                    vector = _half_of_bytes(builder, factor, half)
                    builder.store(vector, moved(builder, codes, at, _SUMS), align=4)
        return context.get_dummy_value()

    return types.none(panels, types.int64, widened), generate


@numba.extending.intrinsic
def store_codes(_context, codes, _row, _column, _value):
    """Write 16 numbers from 0 to 255 as bytes, rounded down."""

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        array, row, column, value = values
        address = element_address(context, builder, declared.args[0], array, row, column)
        numbers = builder.trunc(builder.fptosi(value, _INTS), _BYTES)
        builder.store(numbers, builder.bitcast(address, _BYTES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(codes, types.int64, types.int64, LANES_TYPE), generate


_SMALLEST_SCALE = np.float32(SMALLEST_SCALE)
_ZERO, _HALF, _ONE, _NAN = (np.float32(x) for x in (0, 0.5, 1, np.nan))
_LARGEST = np.finfo(np.float32).max


@inlined
def _measure_row(x, token, outliers, kept, levels, factors):
    """Write the factors of a token, whose scale is NaN if it is not finite.

    Args:
        x: `[tokens, hidden]`.
        kept: `[1, columns]` in whole vectors, 1 for columns that get codes, else 0.
    """
    hidden = x.shape[1]
    whole, begin = hidden // LANES * LANES, 0
    zero = splat(_ZERO)
    # zero times a number is zero, unless the number is NaN or infinite
    total = zero
    lows, highs = splat(_LARGEST), splat(-_LARGEST)
    for k in range(OUTLIERS + 1):
        end = outliers[k] // LANES * LANES if k < OUTLIERS else whole
        last = min(end, whole)
        # two at a time: the smallest and the largest number so far wait for less
        while begin + 2 * LANES <= last:
            first, second = load(x, token, begin), load(x, token, begin + LANES)
            total = total + multiply_add(second, zero, first * zero)
            lows = minimum(lows, minimum(first, second))
            highs = maximum(highs, maximum(first, second))
            begin += 2 * LANES
        if begin < last:
            value = load(x, token, begin)
            total = multiply_add(value, zero, total)
            lows, highs = minimum(lows, value), maximum(highs, value)
        begin = max(begin, end)
        if end < hidden:
            # some of its columns get no codes
            value, weight = load_within(x, token, end), load(kept, 0, end)
            total = multiply_add(value, zero, total)
            lows = minimum(lows, select_greater(weight, zero, value, splat(_LARGEST)))
            highs = maximum(highs, select_greater(weight, zero, value, splat(-_LARGEST)))
            begin = end + LANES
    low = smallest_of(lows)
    scale = max((largest_of(highs) - low) / np.float32(levels), _SMALLEST_SCALE)
    factors[token, 0] = scale if sum_of(total) == _ZERO else _NAN
    factors[token, 1] = low
    for k in range(OUTLIERS):
        factors[token, 2 + k] = number_at(x, token, outliers[k])


@inlined
def _code_row(x, token, factors, codes):
    """Write the codes of a token whose factors are known.

    Codes of outliers, and past the last column, have no meaning; nor have the codes of a token that is not finite.

    Args:
        codes: whole vectors are written.
    """
    low, inverse = splat(factors[token, 1]), splat(_ONE / factors[token, 0])
    whole = x.shape[1] // LANES * LANES
    for column in range(0, whole, LANES):
        value = load(x, token, column) - low
        store_codes(codes, token, column, multiply_add(value, inverse, splat(_HALF)))
    if whole < x.shape[1]:
        value = load_within(x, token, whole) - low
        store_codes(codes, token, whole, multiply_add(value, inverse, splat(_HALF)))


@inlined_body
def quantize_rows(
    first,
    last,
    x,  # [tokens, hidden]
    outliers,  # [OUTLIERS], ascending
    levels,
    codes,  # [tokens, hidden], with more rows and columns
    factors,  # [tokens, FACTORS]
):
    """Write the codes and factors of some tokens; return whether memory ran out."""
    columns = (x.shape[1] + LANES - 1) // LANES * LANES
    memory = new_memory(4 * columns)
    if memory == 0:
        return 1
    kept = fp32_matrix(memory, 1, columns)
    for column in range(columns):
        kept[0, column] = _ONE if column < x.shape[1] else _ZERO
    for i in range(len(outliers)):
        kept[0, outliers[i]] = _ZERO
    # a token is measured before the codes of the last one are written, which then wait for nothing
    for token in range(first, last + 1):
        if token < last:
            _measure_row(x, token, outliers, kept, levels, factors)
        if token > first:
            _code_row(x, token - 1, factors, codes)
    free_memory(memory)
    return 0


@inlined
def _multiply_tile(codes, tile, rows, panels, panel, sums):
    """Write the products of the rows of a tile; others have no meaning."""
    if rows == 1:
        multiply_row(codes, tile, panels, panel, sums)
    elif rows == 2:
        multiply_pair(codes, tile, panels, panel, sums)
    else:
        multiply_rows(codes, tile, panels, panel, sums)


@inlined
def _scale_vector(
    sums, rows, lane, factors, token, scale, fp32_rows, column, out, to_row, to_column
):
    """Write the values of 16 features of a tile, with outliers and bias.

    Args:
        sums: `[rows, TILE_FEATURES]` int32.
        lane: the first of the features in the tile.
        factors: `[tokens, FACTORS]`; the rows of the tile are those from `token` on.
        column: the first of the features in `scale` and `fp32_rows`.
        out: may be the memory of `sums`.
    """
    scales = load_within(scale, 0, column)
    weight_sums, bias = load_within(fp32_rows, 0, column), load_within(fp32_rows, 1, column)
    # one name for each of OUTLIERS
    first, second = load_within(fp32_rows, 2, column), load_within(fp32_rows, 3, column)
    third, fourth = load_within(fp32_rows, 4, column), load_within(fp32_rows, 5, column)
    for i in range(rows):
        row = token + i
        value = multiply_add(splat(number_at(factors, row, 1)), weight_sums, bias)
        value = multiply_add(splat(number_at(factors, row, 2)), first, value)
        value = multiply_add(splat(number_at(factors, row, 3)), second, value)
        value = multiply_add(splat(number_at(factors, row, 4)), third, value)
        value = multiply_add(splat(number_at(factors, row, 5)), fourth, value)
        steps = load(sums, i, lane) * splat(number_at(factors, row, 0))
        value = multiply_add(steps, scales, value)
        store_within(out, to_row + i, to_column, value)


@inlined
def _write_part(part, sums, values, done, factors, scale, fp32_rows, kind, out):
    """Write one of `_PARTS` parts of results: 16 features of half of some rows.

    Args:
        values: the memory of `sums` as fp32, overwritten.
        done: the first row in `sums`, the number of rows, the first of them among all, and the first feature.
    """
    row, rows, token, first_column = done
    middle = (rows + 1) // 2
    lane, first = part // 2 * LANES, part % 2 * middle
    count, column = rows - middle if part % 2 else middle, first_column + lane
    if column < scale.shape[1]:
        found, numbers, token = sums[row + first :], values[row + first :], token + first
        of_vector = found, count, lane, factors, token, scale, fp32_rows, column
        if kind == NO_ACTIVATION:
            _scale_vector(*of_vector, out, token, column)
        else:
            _scale_vector(*of_vector, numbers, 0, lane)
            activate_vector(numbers, count, lane, kind, out, token, column)


@inlined
def _multiply_in_tiles(
    first_unit, last_unit, codes, steps, panels, factors, scale, fp32_rows, kind, memory, out
):
    """Write the results of some units by tiles of AMX, see `multiply_codes`.

    The sums of two tiles become results while the next ones are multiplied.

    Args:
        steps: tiles in a row of codes.
        memory: address of room for the sums of a block, and for the codes of a panel of `pack_halves` as bytes.
    """
    sums = int32_matrix(memory, SUM_ROWS, TILE_FEATURES)
    values = fp32_matrix(memory, SUM_ROWS, TILE_FEATURES)
    widened = uint8_matrix(memory + _SUM_BYTES, 1, steps * ROW_BYTES * TILE_FEATURES)
    of_results = factors, scale, fp32_rows, kind, out
    blocks, configured, widened_panel = (len(factors) + BLOCK - 1) // BLOCK, 0, -1
    done = 0, 0, 0, 0
    for unit in range(first_unit, last_unit):
        block, panel = place_of(unit, len(panels), blocks)
        first = block * BLOCK
        count, column = min(BLOCK, len(factors) - first), panel * TILE_FEATURES
        tiles, height = tiles_of(count)
        if height != configured:
            configure_tiles(height)
            configured = height
        if has_halves(panels) and panel != widened_panel:
            widen_halves(panels, panel, widened)
            widened_panel = panel
        for tile in range(0, tiles, 2):
            row, halves = tile * height, min(2, tiles - tile)
            token, rows = first + row, min(halves * height, count - row)
            fetch_tile(out, token, rows, column, TILE_FEATURES)
            for half in range(halves):
                begin_tiles()
                for step in range(steps):
                    place = step, half, halves == 2
                    if has_halves(panels):
                        add_to_tiles(codes, token, token + height, 0, widened, 0, *place)
                    else:
                        fetch_step(panels, panel, step, tiles, half)
                        add_to_tiles(codes, token, token + height, 0, panels, panel, *place)
                    turn, turns = half * steps + step, halves * steps
                    for part in range(_PARTS * turn // turns, _PARTS * (turn + 1) // turns):
                        _write_part(part, sums, values, done, *of_results)
                end_tiles(sums, row, height, half, halves == 2)
            done = row, rows, token, column
    for part in range(_PARTS):
        _write_part(part, sums, values, done, *of_results)
    release_tiles()


@inlined_body
def multiply_codes(
    first_unit,
    last_unit,
    factors,  # [tokens, FACTORS]
    panels,  # see int8_layout.pack_panels and pack_halves
    codes,  # see quantize_rows
    scale,  # [1, features]
    fp32_rows,  # [2 + OUTLIERS, features]
    kind,
    out,  # [tokens, features]
):
    """Write the results of some units, see `panels.place_of`; return whether memory ran out."""
    columns = panels.shape[1] // TILE_FEATURES * (2 if has_halves(panels) else 1)
    # one or two rows take as long as memory needs to give the panels
    is_tiled = HAS_TILES and columns % ROW_BYTES == 0 and len(factors) > 2
    widened_bytes = columns * TILE_FEATURES if is_tiled and has_halves(panels) else 0
    memory = new_memory(_SUM_BYTES + widened_bytes)
    if memory == 0:
        return 1
    if is_tiled:
        steps, of_rows = columns // ROW_BYTES, (factors, scale, fp32_rows, kind, memory, out)
        _multiply_in_tiles(first_unit, last_unit, codes, steps, panels, *of_rows)
    else:
        sums = int32_matrix(memory, SUM_ROWS, TILE_FEATURES)
        values = fp32_matrix(memory, SUM_ROWS, TILE_FEATURES)
        blocks = (len(factors) + BLOCK - 1) // BLOCK
        for unit in range(first_unit, last_unit):
            block, panel = place_of(unit, len(panels), blocks)
            column = panel * TILE_FEATURES
            last = min(block * BLOCK + BLOCK, len(factors))
            for token in range(block * BLOCK, last, TILE_ROWS):
                rows = min(TILE_ROWS, last - token)
                fetch_tile(out, token, rows, column, TILE_FEATURES)
                _multiply_tile(codes, token, rows, panels, panel, sums)
                done = 0, rows, token, column
                for part in range(_PARTS):
                    _write_part(part, sums, values, done, factors, scale, fp32_rows, kind, out)
    free_memory(memory)
    return 0
