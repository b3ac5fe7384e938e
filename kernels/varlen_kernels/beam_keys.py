"""Integers that order as floating-point numbers do, with one more below them all.

A GPU has one instruction for the largest int32 of a warp (redux) and none for floats, and an int32 has room below -inf:
a place for what is not there, or has been taken.
"""

import triton
import triton.language as tl

# Below the key of -inf.
NO_KEY = tl.constexpr(-(2**31))
# Above every index.
NO_INDEX = tl.constexpr(2**31 - 1)

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def without_nan(x):
    """Return fp32 in which NaN is -inf and +inf the largest finite number."""
    # only NaN differs from itself
    return tl.where(x == x, tl.minimum(x, _LARGEST), float("-inf"))  # noqa: PLR0124


@triton.jit
def key_of(x):
    """Return int32 that order as the fp32 of `x` do, which hold no NaN; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Return the fp32 that `key_of` was given; -inf for NO_KEY."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.where(key == NO_KEY, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def first_after(
    taken_key,
    taken_place,
    key,  # [BLOCK]
    place,  # [BLOCK]
):
    """Return the largest key that comes after what was taken, and the first place that has it; NO_KEY if none does."""
    after = (key < taken_key) | ((key == taken_key) & (place > taken_place))
    key = tl.where(after, key, NO_KEY)
    top = tl.max(key, axis=0)
    return top, tl.min(tl.where(key == top, place, NO_INDEX), axis=0)
