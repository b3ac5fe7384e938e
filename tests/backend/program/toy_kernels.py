"""Small exact int64 ops: several results, state, any dimension.

Without `out`, an op allocates its results, so a program can run without an arena; otherwise it writes into `out`.
"""

import torch

# keeps products far from overflow
MODULUS = 1_000_003


def affine(x, *, by, out=None):
    """Return 3 x + by."""
    return _write([(3 * x + by) % MODULUS], out)


def sum_and_difference(x, y, *, out=None):
    """Return x + y and x - y."""
    return _write([(x + y) % MODULUS, (x - y) % MODULUS], out)


def add_columns(x, y, *, out=None):
    """Return x plus the column sums of y; row counts may differ."""
    return _write([(x + y.sum(0)) % MODULUS], out)


def spread(x, like, *, out=None):
    """Return the column sums of x for each row of `like`, and their doubles."""
    sums = (x.sum(0) % MODULUS).expand(len(like), -1)
    return _write([sums, 2 * sums], out)


def remember(state, x):
    """Add the column sums of x to the state."""
    state.copy_((state + x.sum(0)) % MODULUS)


def recall(state, x, *, out=None):
    """Return x plus the state."""
    return _write([(x + state) % MODULUS], out)


def append(cache, slots, x):
    """Write each row of x into its slot of the cache."""
    cache[slots] = x


def attend(x, cache, slots, *, out=None):
    """Return, per row of x, the weighted sum of cache rows up to its slot.

    The weights are the products of x and the cache rows.
    """
    weights = (x @ cache.T) % MODULUS
    weights[torch.arange(len(cache)) > slots[:, None]] = 0
    return _write([(weights @ cache) % MODULUS], out)


def _write(results, out):
    if out is None:
        return results[0] if len(results) == 1 else tuple(results)
    # compute all results before writing any: `out` may be an operand
    into = (out,) if len(results) == 1 else out
    for tensor, result in zip(into, results, strict=True):
        tensor.copy_(result)
    return out
