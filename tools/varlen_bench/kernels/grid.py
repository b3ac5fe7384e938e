"""The measured shapes: those of the TurboTransformers paper, those of a server's batches, and tiny ones for a dry run.

Source of the paper's shapes: Fang et al. 2021, arXiv:2010.05680, section 6: 12 heads, hidden 768, batches of 1 and 20.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from varlen_bench.peers.checkpoints import BERT_BASE, MINILM, EncoderShape


@dataclass(frozen=True, slots=True)
class Grid:
    """The measured shapes.

    Attributes:
        batches, lengths, heads, hidden: of the paper; all sequences of a batch have one length.
        serving_tokens: packed tokens of a server's batch.
        shortest, longest: bounds of its sequences' lengths, which are uniform.
        serving_widths: hidden size and heads.
        sequences, beams, vocabularies: of the beam step.
        vocabulary, positions: rows of the embedding tables.
        encoders: measured end to end on a server's batch.
        small_batches: number of sequences and their length, for the time of the host.
        copy_bytes: size of the copy that bandwidths are compared with.
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
        shapes = [(batch, length) for batch in self.batches for length in self.lengths]
        return sorted(shapes, key=lambda shape: -shape[0] * shape[1])

    def serving_lengths(self) -> list[int]:
        """Return the lengths of a server's batch."""
        return packed_lengths(self.serving_tokens, self.shortest, self.longest)


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
    encoders=(BERT_BASE, MINILM),
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
    """Return lengths uniform in [shortest, longest] whose sum is `tokens`; the last is cut to fit."""
    draw = random.Random(seed)
    lengths: list[int] = []
    left = tokens
    while left > 0:
        lengths.append(min(left, draw.randint(shortest, longest)))
        left -= lengths[-1]
    return lengths
