"""What is measured: encoders, batch sizes, and the requests that each system runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_bench.kernels.grid import FULL, EncoderShape
from varlen_tools.show_plan.paper_records import lengths

# Token ids of one request, [batch, length].
Ids: TypeAlias = npt.NDArray[np.int32]

# What is measured in a process of its own.
Name: TypeAlias = Literal["varlen", "varlen-no-arena", "transformers"]
OURS: Name = "varlen"
NO_ARENA: Name = "varlen-no-arena"
PEER: Name = "transformers"

REQUESTS, LONGEST = 150, 500
# Positions that the checkpoints have.
POSITIONS = 512
_BATCHES = {"minilm": (1, 4, 20), "bert-base": (1, 4)}
# Larger batches run fewer requests of the stream, the longest among them, so that no case takes an hour.
_STEPS = {("minilm", 4): 2, ("minilm", 20): 10, ("bert-base", 1): 3, ("bert-base", 4): 10}
_QUICK_REQUESTS = 12
_QUICK_BATCHES = {"minilm": (1, 4), "bert-base": (1,)}
_ROUND = 10


@dataclass(frozen=True, slots=True)
class Case:
    """Requests to one encoder.

    Attributes:
        encoder: its shape.
        batch: sequences of each request; all have its length.
        lengths: of the requests, in tokens, in order.
    """

    encoder: EncoderShape
    batch: int
    lengths: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest request."""
        return self.batch * max(self.lengths)

    def requests(self) -> Iterator[Ids]:
        """Yield the ids of each request."""
        return (self.ids(number) for number in range(len(self.lengths)))

    def ids(self, number: int) -> Ids:
        """Return the ids of one request: random, the same ones each time."""
        shape = self.batch, self.lengths[number]
        numbers = np.random.default_rng(number)
        return numbers.integers(0, self.encoder.vocabulary, shape, dtype=np.int32)

    def longest(self) -> Ids:
        """Return the ids of the longest request."""
        return self.ids(self.lengths.index(max(self.lengths)))

    def every(self, step: int) -> Case:
        """Return every so many-th request by length, from the longest on, in their order."""
        by_length = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        kept = sorted(by_length[::step])
        return Case(self.encoder, self.batch, tuple(self.lengths[i] for i in kept))

    def rounds(self) -> list[range]:
        """Return the numbers of the requests of each round, ten each, alike in their lengths' spread."""
        count = max(1, len(self.lengths) // _ROUND)
        return [range(first, len(self.lengths), count) for first in range(count)]

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` makes a case of."""
        return asdict(self)

    @classmethod
    def from_json(cls, case: dict[str, Any]) -> Case:
        """Return the case that `to_json` was called on."""
        return cls(EncoderShape(**case["encoder"]), case["batch"], tuple(case["lengths"]))


def cases(encoder: EncoderShape, *, quick: bool) -> list[Case]:
    """Return the cases of an encoder, smallest batch first; `quick` ones are fewer and shorter."""
    stream = tuple(lengths(REQUESTS, LONGEST))
    if quick:
        stream = stream[:_QUICK_REQUESTS]
        return [Case(encoder, batch, stream) for batch in _QUICK_BATCHES[encoder.name]]
    return [
        Case(encoder, batch, stream).every(_STEPS.get((encoder.name, batch), 1))
        for batch in _BATCHES[encoder.name]
    ]


def encoders(names: str) -> list[EncoderShape]:
    """Return the encoders of these comma-separated names, all if there is none.

    Raises:
        ValueError: a name is not known.
    """
    known = {encoder.name: encoder for encoder in FULL.encoders}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(_BATCHES)
    for name in wanted:
        if name not in known:
            raise ValueError(f"no encoder is called {name!r}; there are {sorted(known)}")
    return [known[name] for name in wanted]
