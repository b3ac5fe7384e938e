"""The shapes: those of the TurboTransformers paper, those of a server's batches, and tiny ones for a dry run.

Source of the first: Fang et al. 2021, arXiv:2010.05680, section 6: 12 heads, hidden 768, batches of 1 and 20.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """An encoder with random weights, of the shape of a known one."""

    name: str
    hidden: int
    layers: int
    heads: int
    features: int
    vocabulary: int = 30_522


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured.

    Attributes:
        batches, lengths: of the paper; every length of a batch is the same.
        heads, hidden: of the paper.
        serving_tokens: packed tokens of a server's batch.
        shortest, longest: its sequences' lengths are uniform between.
        serving_widths: hidden size and heads.
        sequences: batches of the beam step.
        beams: of each sequence.
        vocabularies: of the beam step.
        vocabulary, positions: rows of the embedding tables.
        encoders: measured end to end on a server's batch.
        small_batches: number of sequences and their length, where the host's time counts.
        copy_bytes: read, and written, by the copy that bandwidths are compared with.
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int
    hidden: int
    serving_tokens: int
    shortest: int
    longest: int
    serving_widths: tuple[tuple[int, int], ...]
    sequences: tuple[int, ...]
    beams: int
    vocabularies: tuple[int, ...]
    vocabulary: int
    positions: int
    encoders: tuple[EncoderShape, ...]
    small_batches: tuple[tuple[int, int], ...]
    copy_bytes: int

    def paper(self) -> list[tuple[int, int]]:
        """Return (batch, length) of the paper, the largest first: a run may end before the last."""
        return sorted(
            ((batch, length) for batch in self.batches for length in self.lengths),
            key=lambda shape: -shape[0] * shape[1],
        )

    def serving_lengths(self, seed: int = 0) -> list[int]:
        """Return random lengths of `serving_tokens` together; the last is cut to fit."""
        return packed_lengths(self.serving_tokens, self.shortest, self.longest, seed)


FULL = Grid(
    batches=(1, 20),
    lengths=(10, 20, 40, 60, 80, 100, 200, 300, 400, 500),
    heads=12,
    hidden=768,
    serving_tokens=8192,
    shortest=5,
    longest=500,
    serving_widths=((768, 12), (384, 12), (1024, 16)),
    sequences=(8, 1, 32, 128),
    beams=4,
    vocabularies=(32_000, 250_000),
    vocabulary=30_522,
    positions=512,
    encoders=(
        EncoderShape("bert-base", hidden=768, layers=12, heads=12, features=3072),
        EncoderShape("minilm", hidden=384, layers=6, heads=12, features=1536),
    ),
    small_batches=((1, 20), (8, 20)),
    copy_bytes=1024**3,
)

# Two of each, so that every line of the benchmark runs on a CPU in seconds.
TINY = Grid(
    batches=(1, 2),
    lengths=(3, 16),
    heads=2,
    hidden=32,
    serving_tokens=48,
    shortest=2,
    longest=20,
    serving_widths=((64, 2),),
    sequences=(2, 1),
    beams=2,
    vocabularies=(100,),
    vocabulary=50,
    positions=32,
    encoders=(EncoderShape("tiny", hidden=32, layers=2, heads=2, features=64, vocabulary=50),),
    small_batches=((1, 5),),
    copy_bytes=4096,
)


def packed_lengths(tokens: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """Return lengths uniform in [shortest, longest], in order of arrival; the last is cut to make the sum `tokens`."""
    draw = random.Random(seed)
    lengths: list[int] = []
    left = tokens
    while left > 0:
        lengths.append(min(left, draw.randint(shortest, longest)))
        left -= lengths[-1]
    return lengths
