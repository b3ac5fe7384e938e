"""Brute-force checks of memory plans, independent of how a plan was made."""

from itertools import pairwise


def overlaps(usages, offsets, sizes):
    """Return pairs of usages that occupy the same byte at the same op.

    Args:
        usages: usage records with `first_op` and `last_op`, inclusive.
        offsets, sizes: offset and size of each usage, in bytes; usages of other chunks have offsets far apart.
    """
    found = []
    for op in range(max((usage.last_op for usage in usages), default=-1) + 1):
        live = sorted(
            (offset, offset + size, number)
            for number, (usage, offset, size) in enumerate(zip(usages, offsets, sizes, strict=True))
            if usage.first_op <= op <= usage.last_op and size
        )
        for (_, end, one), (begin, _, other) in pairwise(live):
            if begin < end:
                found.append((op, one, other))
    return found


def peak_live(usages, sizes):
    """Return the most bytes that are live at any op."""
    return max(
        (
            sum(
                size
                for usage, size in zip(usages, sizes, strict=True)
                if usage.first_op <= op <= usage.last_op
            )
            for op in range(max((usage.last_op for usage in usages), default=0) + 1)
        ),
        default=0,
    )
