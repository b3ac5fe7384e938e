"""The measured shapes: shapes of TurboTransformers, of a server, and tiny ones.

Source of the paper's shapes: Fang et al. 2021, arXiv:2010.05680, section 6: 12 heads, hidden 768, batches of 1 and 20.
"""

import random
from dataclasses import dataclass, replace

from varlen_bench.peers.checkpoints import BERT_BASE, MINILM, EncoderShape


@dataclass(frozen=True, slots=True)
class Grid:
    """The measured shapes; the defaults suit a GPU.

    Attributes:
        batches, lengths, heads, hidden: the paper; all sequences of a batch have one length.
        serving_tokens: packed tokens of a server's batch.
        shortest, longest: bounds of its sequence lengths, which are uniform.
        serving_widths: hidden size and heads.
        sequences, beams, vocabularies: the beam step.
        paged: paged attention: sequences, new tokens of each, and longest context.
        decoder_heads: its heads, key heads and head_dim.
        vocabulary, positions: rows of the embedding tables.
        encoders: measured on a server's batch.
        small_batches: number and length of the sequences, to measure the host's time.
        copy_bytes: size of the copy that gives the bandwidth of the device.
        with_compile: whether torch.compile is a peer.
    """

    batches: tuple[int, ...] = (1, 20)
    lengths: tuple[int, ...] = (10, 20, 40, 60, 80, 100, 200, 300, 400, 500)
    heads: int = 12
    hidden: int = 768
    serving_tokens: int = 8192
    shortest: int = 5
    longest: int = 500
    serving_widths: tuple[tuple[int, int], ...] = ((768, 12), (384, 12), (1024, 16))
    sequences: tuple[int, ...] = (8, 1, 32, 128)
    beams: int = 4
    vocabularies: tuple[int, ...] = (32_000, 250_000)
    paged: tuple[tuple[int, int, int], ...] = (
        (64, 1, 1024),
        (8, 1, 8192),
        (256, 1, 512),
        (4, 256, 1024),
    )
    decoder_heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (12, 12, 64))
    vocabulary: int = 30_522
    positions: int = 512
    encoders: tuple[EncoderShape, ...] = (BERT_BASE, MINILM)
    small_batches: tuple[tuple[int, int], ...] = ((1, 20), (8, 20))
    copy_bytes: int = 1024**3
    with_compile: bool = True

    def paper(self) -> list[tuple[int, int]]:
        """Return (batch, length) of the paper, the largest first in case the time runs out."""
        shapes = [(batch, length) for batch in self.batches for length in self.lengths]
        return sorted(shapes, key=lambda shape: -shape[0] * shape[1])

    def serving_lengths(self) -> list[int]:
        """Return the sequence lengths of a server's batch."""
        return packed_lengths(self.serving_tokens, self.shortest, self.longest)


FULL = Grid()
# Half of the paper's lengths, and no peer that takes seconds to compile.
QUICK = replace(FULL, lengths=(10, 40, 100, 200, 500), with_compile=False)
# Small enough that the whole benchmark runs on a CPU in seconds.
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
    paged=((2, 1, 40), (2, 5, 20)),
    decoder_heads=((4, 2, 16),),
    vocabulary=50,
    positions=32,
    encoders=(EncoderShape("tiny", hidden=32, layers=2, heads=2, features=64, vocabulary=50),),
    small_batches=((1, 5),),
    copy_bytes=4096,
)


def packed_lengths(tokens: int, shortest: int, longest: int) -> list[int]:
    """Return fixed random lengths that sum to `tokens`, uniform except for the last."""
    generator = random.Random(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, generator.randint(shortest, longest)))
    return lengths
