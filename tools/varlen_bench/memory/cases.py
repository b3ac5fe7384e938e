"""What is measured: encoders, batch sizes, and the requests of each case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_bench.compare.systems import System
from varlen_bench.peers.checkpoints import BERT_BASE, MINILM, EncoderShape
from varlen_tools.show_plan.paper import lengths

# Token ids of one request, [batch, length].
Ids: TypeAlias = npt.NDArray[np.int32]
# Systems, each measured in its own process.
OURS = System("varlen", "varlen", "fp32", "engine")
NO_ARENA = System("varlen-no-arena", "varlen", "fp32", "engine")
PEER = System("transformers", "transformers", "fp32", "engine")

POSITIONS = 512
ENCODERS = {shape.name: shape for shape in (MINILM, BERT_BASE)}
_REQUESTS, _QUICK_REQUESTS, _LONGEST = 150, 12, 500
# Batch sizes of each encoder. Larger ones run every n-th request by length, so that no case takes an hour.
_STEPS = {"minilm": {1: 1, 4: 2, 20: 10}, "bert-base": {1: 3, 4: 10}}
_ROUND = 10


@dataclass(frozen=True, slots=True)
class Case:
    """Requests to one encoder; request i has `batch` sequences of `lengths[i]` tokens."""

    encoder: EncoderShape
    batch: int
    lengths: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest request."""
        return self.batch * max(self.lengths)

    def ids(self, number: int) -> Ids:
        """Return the ids of one request: random, and the same each time."""
        shape = self.batch, self.lengths[number]
        numbers = np.random.default_rng(number)
        return numbers.integers(0, self.encoder.vocabulary, shape, dtype=np.int32)

    def longest(self) -> Ids:
        """Return the ids of the longest request."""
        return self.ids(self.lengths.index(max(self.lengths)))

    def every(self, step: int) -> Case:
        """Return every `step`-th request by length, the longest among them, in their order."""
        by_length = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        kept = sorted(by_length[::step])
        return replace(self, lengths=tuple(self.lengths[i] for i in kept))

    def rounds(self) -> list[range]:
        """Return the numbers of the requests of each round: ten requests of mixed lengths."""
        count = max(1, len(self.lengths) // _ROUND)
        return [range(first, len(self.lengths), count) for first in range(count)]

    @classmethod
    def from_json(cls, case: dict[str, Any]) -> Case:
        """Return the case whose `asdict` was written as JSON."""
        return cls(EncoderShape(**case["encoder"]), case["batch"], tuple(case["lengths"]))


def cases(encoder: EncoderShape, *, quick: bool) -> list[Case]:
    """Return the cases of an encoder, smallest batch first; quick ones have few requests."""
    steps = _STEPS[encoder.name]
    stream = tuple(lengths(_REQUESTS, _LONGEST))
    if quick:
        largest = max(steps)
        return [Case(encoder, size, stream[:_QUICK_REQUESTS]) for size in steps if size < largest]
    return [Case(encoder, size, stream).every(step) for size, step in steps.items()]
