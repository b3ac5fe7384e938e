"""How a batch is shared out over cores: whole sequences to each, so that cores need not wait for one another.

Several cores inside one matrix product meet at the end of every op; several cores with a part of
the batch each meet once. docs/decisions/0006-lanes.md has what that is worth.
"""

from collections.abc import Sequence

# The speed of n cores on one product, as a power of n: two are taken to do 1.5 times the work of one.
_SCALING = 0.6


def share_out(lengths: Sequence[int], cores: int, hidden_size: int) -> list[list[int]]:
    """Return the sequences of each share, as ascending indices; one share if all cores do better on the whole.

    The longest sequence goes to the lightest share, then the next (Graham 1969: at most 4/3 of the
    best possible finish).

    Args:
        lengths: of the batch's sequences, in tokens; at least one.
        cores: that the batch may use.
        hidden_size: of the model; attention, quadratic in length, weighs less the larger it is.
    """
    whole = [list(range(len(lengths)))]
    if cores == 1 or len(lengths) == 1:
        return whole
    costs = [length * (length + 2 * hidden_size) for length in lengths]
    shares: list[list[int]] = [[] for _ in range(min(cores, len(lengths)))]
    loads = [0] * len(shares)
    for index in sorted(range(len(lengths)), key=lambda i: -costs[i]):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += costs[index]
    if max(loads) > sum(costs) / cores**_SCALING:
        return whole
    return [sorted(share) for share in shares]
