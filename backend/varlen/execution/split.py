"""Splits a batch into sub-batches of whole sequences, one for each core.

Cores that share a matrix product synchronize at the end of every op; cores with a sub-batch each
synchronize once. docs/decisions/0006-sub-batches.md has measurements.
"""

from collections.abc import Sequence

# Speed of n cores on one product, as a power of n: two count as 1.5.
_SCALING = 0.6


def split_batch(lengths: Sequence[int], cores: int, hidden_size: int) -> list[list[int]]:
    """Return the indices of the sequences of each sub-batch, shortest first.

    There is one sub-batch if all cores together run the batch faster. Otherwise the longest
    sequence goes to the lightest sub-batch, then the next (Graham 1969: at most 4/3 of the
    best possible finish). Within a sub-batch, neighbours of one length share an attention call.

    Args:
        lengths: of the batch's sequences, in tokens; at least one.
        cores: that the batch may use.
        hidden_size: of the model; the larger it is, the less the quadratic cost of attention weighs.
    """
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    if cores == 1 or len(lengths) == 1:
        return [ascending]
    costs = [length * (length + 2 * hidden_size) for length in lengths]
    loads = [0] * min(cores, len(lengths))
    owner = [0] * len(lengths)
    for index in sorted(ascending, key=lambda i: -costs[i]):
        lightest = loads.index(min(loads))
        owner[index] = lightest
        loads[lightest] += costs[index]
    if max(loads) > sum(costs) / cores**_SCALING:
        return [ascending]
    sub_batches: list[list[int]] = [[] for _ in loads]
    for index in ascending:
        sub_batches[owner[index]].append(index)
    return sub_batches
