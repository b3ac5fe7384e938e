"""Sort keys: int32 numbers in the order of the fp32 numbers that they encode.

A GPU has an instruction for the maximum int32 of a warp (redux), but none for floats. NO_KEY is below all
keys, and marks entries that are missing or already selected.
"""

import triton
import triton.language as tl

# Less than the key of -inf.
NO_KEY = tl.constexpr(-(2**31))
# Greater than every index.
NO_INDEX = tl.constexpr(2**31 - 1)

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def without_nan(x):
    """Return fp32 `x` with NaN replaced by -inf, and +inf by the largest finite number."""
    # only NaN differs from itself
    return tl.where(x == x, tl.minimum(x, _LARGEST), float("-inf"))  # noqa: PLR0124


@triton.jit
def key_of(x):
    """Return the int32 sort keys of fp32 `x`, which has no NaN; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Return the fp32 numbers of sort keys; -inf for NO_KEY."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.where(key == NO_KEY, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def first_after(
    selected_key,
    selected_index,
    key,  # [BLOCK]
    index,  # [BLOCK]
):
    """Return the entry (key, index) after the selected one; NO_KEY at the end.

    Entries are ordered by descending key, and equal keys by ascending index.
    """
    after = (key < selected_key) | ((key == selected_key) & (index > selected_index))
    key = tl.where(after, key, NO_KEY)
    best = tl.max(key, axis=0)
    return best, tl.min(tl.where(key == best, index, NO_INDEX), axis=0)
