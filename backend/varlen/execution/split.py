"""How a batch is split over cores: whole sequences to each, so that cores need not wait for one another.

Several cores inside one matrix product meet at the end of every op; several cores with a sub-batch
each meet once. docs/decisions/0006-sub-batches.md has what that is worth.
"""

from collections.abc import Sequence

# Speed of n cores on one product, as a power of n: two are taken to do 1.5 times the work of one.
_SCALING = 0.6


def split_batch(lengths: Sequence[int], cores: int, hidden_size: int) -> list[list[int]]:
    """Return the sequences of each sub-batch, shortest first; one sub-batch if all cores are faster on the whole.

    The longest sequence goes to the lightest sub-batch, then the next (Graham 1969: at most 4/3 of the
    best possible finish). Within a sub-batch, neighbours of one length share an attention call.

    Args:
        lengths: of the batch's sequences, in tokens; at least one.
        cores: that the batch may use.
        hidden_size: of the model; attention, quadratic in length, weighs less the larger it is.
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
