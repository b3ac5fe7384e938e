"""Random numbers of sequences: the same ones for a seed, whatever runs beside a sequence.

A number depends only on the seed, the sample and the position in the answer, so a sequence that is computed again
continues as before.
Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = 0x9E37_79B9_7F4A_7C15
_MULTIPLIERS = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
_MASK = 2**64 - 1


def random_key(seed: int, sample: int) -> int:
    """Return the key of the numbers of one sequence, of 64 bits.

    Args:
        seed: seed of its request, 64 bits, signed or not.
        sample: its number among the samples of its prompt.
    """
    key = _mix(np.array([seed & _MASK], dtype=np.uint64))
    return int(_mix(key + np.uint64(sample))[0])


def uniform_numbers(keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return a number from 0 to below 1 for each key and position, `[keys]` fp64."""
    counter = np.array(positions, dtype=np.uint64) * np.uint64(_GAMMA)
    bits = _mix(np.array(keys, dtype=np.uint64) + counter)
    return (bits >> np.uint64(11)) * 2.0**-53


def uniform_range(key: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """Return the numbers of `count` positions from `first` on, `[count]` fp64."""
    counter = np.arange(first, first + count, dtype=np.uint64) * np.uint64(_GAMMA)
    bits = _mix(np.array([key], dtype=np.uint64) + counter)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each value; arrays wrap around at 64 bits."""
    values = values + np.uint64(_GAMMA)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(multiplier)
    return values ^ (values >> np.uint64(31))
