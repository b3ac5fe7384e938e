"""Compiled code of the ops between ranks, see `reference.ranks`.

A rank that waits spins, for the others are seldom late by more; then it offers its core to others, as on a machine with
fewer cores than ranks; then it sleeps.
"""

from varlen_kernels.cpu.bodies.epilogues import load_within, store_within
from varlen_kernels.cpu.native.native import (
    copy_bytes,
    free_memory,
    inlined,
    inlined_body,
    matrix_like,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.cpu.native.waits import (
    SPINS,
    nanoseconds,
    pause,
    share_number,
    shared_number,
    sleep,
    yield_core,
)
from varlen_kernels.reference.rank_memory import (
    BUFFER_BYTES,
    FAILED,
    LINE_WORDS,
    LONGEST_WAIT,
    TURNS,
)

# Times that a rank offers its core to others before it sleeps, and for how long it does, in microseconds.
_OFFERS, _SLEEP = 2000, 50
_LINE_BYTES = 8 * LINE_WORDS


@inlined_body
def all_reduce(first_unit, last_unit, x, x_address, ranks, rank, size, out_address):
    """Write the sum of numbers of all ranks; return whether memory ran out.

    Args:
        first_unit, last_unit: the only unit, or none.
        x, x_address: this rank's numbers.
        ranks, out_address: addresses of the memory of all ranks, and of the sum.
        rank, size: number of this rank, and of all.
    """
    if first_unit == last_unit:
        return 0
    item_bytes, count = x.itemsize, x.size
    clock = new_memory(16)
    if clock == 0:
        return 1
    room = BUFFER_BYTES // item_bytes
    for first in range(0, count, room):
        part = min(room, count - first)
        turn = _turn(ranks, rank)
        copy_bytes(
            _buffer(ranks, size, rank, turn), x_address + first * item_bytes, part * item_bytes
        )
        _meet(ranks, rank, size, turn, clock)
        total = matrix_like(x, out_address + first * item_bytes, 1, part)
        for column in range(0, part, LANES):
            numbers = matrix_like(x, _buffer(ranks, size, 0, turn), 1, part)
            value = load_within(numbers, 0, column)
            for other in range(1, size):
                numbers = matrix_like(x, _buffer(ranks, size, other, turn), 1, part)
                value = value + load_within(numbers, 0, column)
            store_within(total, 0, column, value)
    free_memory(clock)
    return 0


@inlined_body
def gather_columns(first_unit, last_unit, x, x_address, ranks, rank, size, out, out_address):
    """Write the columns of all ranks on rank 0; return whether memory ran out.

    Args:
        first_unit, last_unit, ranks, rank, size: see `all_reduce`.
        x, x_address: this rank's columns, `[rows, columns]`.
        out, out_address: `[rows, width]`.
    """
    if first_unit == last_unit:
        return 0
    item_bytes, width, (rows, columns) = x.itemsize, out.shape[1], x.shape
    clock = new_memory(16)
    if clock == 0:
        return 1
    most = (width + size - 1) // size
    at_once = max(1, BUFFER_BYTES // (most * item_bytes))
    first = 0
    while first < rows:
        count = min(at_once, rows - first)
        # rows wider than a buffer come in parts
        step, begin = min(most, BUFFER_BYTES // item_bytes // count), 0
        while begin < most:
            turn = _turn(ranks, rank)
            own = max(0, min(columns - begin, step))
            _copy_rows(
                _buffer(ranks, size, rank, turn),
                own * item_bytes,
                x_address + (first * columns + begin) * item_bytes,
                columns * item_bytes,
                count,
                own * item_bytes,
            )
            _meet(ranks, rank, size, turn, clock)
            if rank == 0:
                for other in range(size):
                    low = min(width, other * most + begin)
                    high = max(low, min(width, (other + 1) * most, low + step))
                    _copy_rows(
                        out_address + (first * width + low) * item_bytes,
                        width * item_bytes,
                        _buffer(ranks, size, other, turn),
                        (high - low) * item_bytes,
                        count,
                        (high - low) * item_bytes,
                    )
            begin += step
        first += count
    free_memory(clock)
    return 0


@inlined
def _copy_rows(to, to_stride, source, source_stride, rows, size):
    """Copy rows of some bytes; a stride is the distance of two rows in bytes."""
    if size > 0:
        for row in range(rows):
            copy_bytes(to + row * to_stride, source + row * source_stride, size)


@inlined
def _line(ranks, rank):
    """Return the address of a rank's line."""
    return ranks + (1 + rank) * _LINE_BYTES


@inlined
def _turn(ranks, rank):
    """Return the number of turns that a rank has come to."""
    return shared_number(_line(ranks, rank) + 8 * TURNS)


@inlined
def _buffer(ranks, size, rank, turn):
    """Return the address of the buffer of a rank in a turn."""
    return ranks + (1 + size) * _LINE_BYTES + (2 * rank + turn % 2) * BUFFER_BYTES


@inlined
def _meet(ranks, rank, size, turn, clock):
    """Say that this rank has come to a turn; wait for all others."""
    share_number(_line(ranks, rank) + 8 * TURNS, turn + 1)
    for other in range(size):
        waits = began = 0
        while _turn(ranks, other) <= turn and shared_number(ranks + 8 * FAILED) == 0:
            waits += 1
            if waits < SPINS:
                pause()
            else:
                # an offer that others take lasts for milliseconds, so its time counts
                now = nanoseconds(clock)
                began = now if began == 0 else began
                longest = shared_number(ranks + 8 * LONGEST_WAIT)
                if longest != 0 and now - began > longest:
                    share_number(ranks + 8 * FAILED, 1 + other)
                if waits < SPINS + _OFFERS:
                    yield_core()
                else:
                    sleep(_SLEEP)
