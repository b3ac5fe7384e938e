"""The numbers of tokens that batches are padded to on a CPU.

Products are compiled for each of them.
"""

# How many there are from one power of two to the next, and the smallest difference.
_STEPS, _LEAST_STEP = 8, 8


def padded(tokens: int) -> int:
    """Return the least of `batch_sizes` that has room for this number of tokens."""
    step = max(_LEAST_STEP, (1 << (tokens.bit_length() - 1)) // _STEPS)
    return -(-tokens // step) * step


def batch_sizes(most: int) -> list[int]:
    """Return the numbers of tokens that batches are padded to, ascending, up to `most`."""
    return sorted({padded(tokens) for tokens in range(1, most + 1)})
