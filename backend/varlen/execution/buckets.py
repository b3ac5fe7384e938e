"""Buckets: the batch sizes for which a CUDA graph is captured.

A graph has fixed shapes, so a batch runs in the smallest captured size that holds it: at most an
eighth more tokens from 128 on, which belong to no sequence and cost only their share of the linear
layers. The capacity for sequences comes in three sizes, since the grid of attention grows with it.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from varlen.memory.usage import Dims

_SMALLEST = 16
# Sizes from one power of two to the next.
_STEPS = 8
# Mean tokens per sequence that a bucket has capacity for. The attention kernel chooses its tiles by the same means.
_MEAN_LENGTHS = (64, 16, 1)


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The tokens and sequences that one graph has capacity for."""

    tokens: int
    sequences: int

    @property
    def dims(self) -> Dims:
        """The dimensions that its graph runs with."""
        return {"tokens": self.tokens, "sequences": self.sequences}


class Buckets:
    """All buckets for batches of at most `max_tokens` tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._tokens = list(_token_sizes(max_tokens))

    def __iter__(self) -> Iterator[Bucket]:
        """Yield each bucket once, the largest first."""
        for tokens in reversed(self._tokens):
            for sequences in sorted(set(_sequence_sizes(tokens)), reverse=True):
                yield Bucket(tokens, sequences)

    def smallest(self, tokens: int, sequences: int) -> Bucket:
        """Return the smallest bucket for a batch; each sequence has at least one token.

        Raises:
            ValueError: the batch has more tokens than the largest bucket.
        """
        if tokens > self._tokens[-1]:
            raise ValueError(f"a batch of {tokens} tokens; allowed: up to {self._tokens[-1]}")
        size = self._tokens[bisect_left(self._tokens, tokens)]
        return Bucket(size, next(n for n in _sequence_sizes(size) if n >= sequences))


def _token_sizes(most: int) -> Iterator[int]:
    size = _SMALLEST
    while size < most:
        yield size
        octave = 1 << (size.bit_length() - 1)
        size += max(_SMALLEST, octave // _STEPS)
    yield most


def _sequence_sizes(tokens: int) -> list[int]:
    """Return the capacities for sequences, ascending."""
    return [max(1, tokens // mean) for mean in _MEAN_LENGTHS]
