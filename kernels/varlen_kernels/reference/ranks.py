"""Ops between the ranks of a model: sums, and joins of columns.

All ranks run the same ops on as many rows, in the same order. They exchange numbers through the memory that
`rank_memory` describes. Each turn moves as many numbers as a buffer holds: a rank writes its own, says so,
waits for all others, and reads what they wrote. Two buffers of each rank take turns: by the time that a rank
writes one again, all others have come to the turn between, so they have read it.
"""

import time

import torch
from torch import Tensor

from varlen_kernels.reference.rank_memory import (
    BUFFER_BYTES,
    FAILED,
    LINE_WORDS,
    LONGEST_WAIT,
    TURNS,
)

__all__ = ["all_reduce", "gather_columns", "local_ids"]

# Seconds between two looks at a rank that is awaited.
_PAUSE = 2e-5


def all_reduce(
    x: Tensor, ranks: Tensor, *, rank: int, size: int, out: Tensor | None = None
) -> Tensor:
    """Return the sum of `x` over all ranks.

    All ranks get the same bits: they add in the order of ranks, in fp32, and round once. If a rank does
    not come, the result is undefined, and `failed_rank` names the rank.

    Args:
        x: `[rows, columns]` fp32 or bf16, a part of the sum.
        ranks: `[rank_words(size)]` int64, memory of all ranks.
        out: `[rows, columns]`; may be `x`.
    """
    out = torch.empty_like(x) if out is None else out
    given, result = x.reshape(-1), out.reshape(-1)
    room = BUFFER_BYTES // x.element_size()
    for first in range(0, given.numel(), room):
        part = given[first : first + room]
        total, *others = (buffer[: len(part)].float() for buffer in _meet(part, ranks, rank, size))
        for other in others:
            # not in place: in fp32, `total` is the buffer of rank 0
            total = total + other
        result[first : first + room] = total
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.view(out.shape))
    return out


def gather_columns(
    x: Tensor, ranks: Tensor, *, rank: int, size: int, width: int, out: Tensor | None = None
) -> Tensor:
    """Return the columns of all ranks side by side.

    Only the result of rank 0 is defined.

    Args:
        x: `[rows, columns]` fp32 or bf16: each rank has ceil(width / size) columns, the last ones fewer.
        ranks, rank, size: see `all_reduce`.
        width: number of columns of all ranks.
        out: `[rows, width]`.
    """
    out = x.new_empty(len(x), width) if out is None else out
    most = -(-width // size)
    rows = max(1, BUFFER_BYTES // (most * x.element_size()))
    for first in range(0, len(x), rows):
        # rows wider than a buffer come in parts
        count = min(rows, len(x) - first)
        step = min(most, BUFFER_BYTES // x.element_size() // count)
        for begin in range(0, most, step):
            mine = x[first : first + count, begin : begin + step]
            buffers = _meet(mine.reshape(-1), ranks, rank, size)
            if rank:
                continue
            for number, buffer in enumerate(buffers):
                low = min(width, number * most + begin)
                high = max(low, min(width, (number + 1) * most, low + step))
                columns = buffer[: count * (high - low)].view(count, high - low)
                out[first : first + count, low:high] = columns
    return out


def local_ids(token_ids: Tensor, *, first: int, count: int, out: Tensor | None = None) -> Tensor:
    """Return the rows of tokens in a part of a table.

    Tokens of other parts have the row `count`.

    Args:
        token_ids: `[tokens]` int32.
        first: the first token of the part.
        out: `[tokens]` int32.
    """
    out = torch.empty_like(token_ids) if out is None else out
    rows = token_ids - first
    out.copy_(torch.where((rows >= 0) & (rows < count), rows, count))
    return out


def failed_rank(ranks: Tensor) -> int | None:
    """Return the number of a rank that did not come in time, or None."""
    failed = int(ranks[FAILED])
    return failed - 1 if failed else None


def _meet(mine: Tensor, ranks: Tensor, rank: int, size: int) -> list[Tensor]:
    """Write this rank's numbers; return the buffers of all ranks once all have come."""
    lines = ranks[: LINE_WORDS * (1 + size)].view(1 + size, LINE_WORDS)
    turn = int(lines[1 + rank, TURNS])
    words = BUFFER_BYTES // 8
    buffers = ranks[LINE_WORDS * (1 + size) :].view(size, 2, words)[:, turn % 2]
    buffers = buffers.view(mine.dtype)
    buffers[rank, : len(mine)] = mine
    lines[1 + rank, TURNS] = turn + 1
    for number in range(size):
        began = time.monotonic_ns()
        while int(lines[1 + number, TURNS]) <= turn and not int(ranks[FAILED]):
            limit = int(ranks[LONGEST_WAIT])
            if limit and time.monotonic_ns() - began > limit:
                ranks[FAILED] = 1 + number
            time.sleep(_PAUSE)
    return list(buffers)
