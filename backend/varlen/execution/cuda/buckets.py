"""Buckets: the batch sizes for which a CUDA graph is captured.

A graph has fixed shapes, so a batch runs in the smallest captured size that holds it. The tokens that this adds belong
to no sequence, at most an eighth from 512 on; smaller sizes are further apart. The capacity for sequences comes in few
sizes, which decide the tiles of attention by the mean length. docs/decisions/0029-gpu-executor.md has the counts.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from varlen.execution.packing import largest_payloads
from varlen.memory.usage import Dims

_SMALLEST = 16
# Sizes double up to this one. It is the rows of a tile of matrix products, so fewer rows take as long.
_DOUBLING = 128
# Smallest step after that.
_SMALLEST_STEP = 64
# Sizes from one power of two to the next.
_STEPS = 8


class _Room(NamedTuple):
    """A capacity for sequences.

    Attributes:
        mean_length: tokens of a bucket per sequence.
        from_tokens: smallest size that has this capacity.
    """

    mean_length: int
    from_tokens: int


# Attention chooses its launch by the same means. In batches that do not fill a GPU, small tiles are as fast.
_ROOMS = (_Room(256, 2048), _Room(64, 192), _Room(16, 1024), _Room(1, 0))


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The tokens and sequences that one graph has capacity for."""

    tokens: int
    sequences: int

    @property
    def dims(self) -> Dims:
        """The dimensions that its graph runs with."""
        payloads = largest_payloads(self.tokens, self.sequences)
        # no spans
        pooled = {"pooled": self.sequences, "pooled_tokens": 0}
        return {"tokens": self.tokens, "sequences": self.sequences, **payloads, **pooled}


class Buckets:
    """All buckets for batches of at most `max_tokens` tokens and `max_sequences` sequences.

    A longer sequence, up to `longest` tokens, has a bucket without room for others.
    """

    def __init__(self, max_tokens: int, max_sequences: int, *, longest: int = 0) -> None:
        self._max_tokens = max_tokens
        longer = [size for size in _token_sizes(longest) if size > max_tokens] if longest else []
        self._tokens = [*_token_sizes(max_tokens), *longer]
        self._max_sequences = max_sequences

    def __iter__(self) -> Iterator[Bucket]:
        """Yield each bucket once, the largest first."""
        for tokens in reversed(self._tokens):
            for sequences in reversed(self._rooms(tokens)):
                yield Bucket(tokens, sequences)

    def smallest(self, tokens: int, sequences: int) -> Bucket:
        """Return the smallest bucket for a batch; each sequence has at least one token.

        Raises:
            ValueError: the batch has more tokens or sequences than the largest bucket.
        """
        if tokens > self._tokens[-1]:
            raise ValueError(f"a batch of {tokens} tokens; allowed: up to {self._tokens[-1]}")
        if sequences > self._max_sequences:
            raise ValueError(
                f"a batch of {sequences} sequences; allowed: up to {self._max_sequences}"
            )
        size = self._tokens[bisect_left(self._tokens, tokens)]
        if size > self._max_tokens and sequences > 1:
            raise ValueError(
                f"{sequences} sequences of {tokens} tokens; allowed: up to {self._max_tokens} tokens together"
            )
        return Bucket(size, next(room for room in self._rooms(size) if room >= sequences))

    def largest_of_each_class(self) -> list[Bucket]:
        """Return the largest bucket of each mean length, the largest first.

        The bucket of a sequence that is longer than a batch is one more.
        """
        largest: dict[int, Bucket] = {}
        longest = self._tokens[-1]
        if longest > self._max_tokens:
            largest[longest] = Bucket(longest, 1)
        for bucket in self:
            if bucket.tokens > self._max_tokens:
                continue
            mean = bucket.tokens // bucket.sequences
            room = next(room for room in _ROOMS if mean >= room.mean_length)
            largest.setdefault(room.mean_length, bucket)
        return sorted(largest.values(), reverse=True)

    def _rooms(self, tokens: int) -> list[int]:
        """Return the capacities for sequences of a size, ascending."""
        if tokens > self._max_tokens:
            return [1]
        rooms = {
            min(max(1, tokens // room.mean_length), self._max_sequences)
            for room in _ROOMS
            if tokens >= room.from_tokens
        }
        return sorted(rooms)


def _token_sizes(most: int) -> Iterator[int]:
    size = _SMALLEST
    while size < most:
        yield size
        octave = 1 << (size.bit_length() - 1)
        size += size if size < _DOUBLING else max(_SMALLEST_STEP, octave // _STEPS)
    yield most
