"""Steps of prompts that compile every kernel of a GPU before it serves.

Steps that only decode are captured as graphs, at load. The others run op by op. Which kernels these compile depends on
their mean new tokens, on whether they have several sequences, and on whether single tokens beside prompts are read in
splits, which are fewer the more sequences there are.
"""

from collections.abc import Iterator
from typing import cast

import numpy as np

from varlen.generation_options import GenerationOptions
from varlen.request import Prompt, Reply, Request, RequestOptions
from varlen.sequence import Chunk, GeneratedSequence, RequestState


def warm_up_steps(
    *, max_tokens: int, max_length: int, max_sequences: int, block_size: int, has_sources: bool
) -> Iterator[list[Chunk]]:
    """Yield steps of chunks without samples; all of them are in block 0.

    Args:
        max_tokens: of a step.
        max_length: tokens of the longest sequence, and of the longest source.
        max_sequences: of a step.
        block_size: tokens of a block.
        has_sources: whether each sequence has a source text.
    """

    def chunk(length: int, source: int) -> Chunk:
        prompt = Prompt(
            np.zeros(length, dtype=np.int32),
            source_ids=np.zeros(source, dtype=np.int32) if has_sources else None,
        )
        options = RequestOptions(generation=GenerationOptions())
        # never answered
        (sequence,) = RequestState(Request((prompt,), options), cast(Reply, None), 0.0).sequences
        assert isinstance(sequence, GeneratedSequence)
        blocks, sources = ((0,) * -(-count // block_size) for count in (length, source))
        ids = (0,) * length
        if not has_sources:
            return Chunk(sequence, 0, ids, blocks, ())
        return Chunk(sequence, 0, ids, blocks, (), sources, (0,) * source)

    length = 2
    while length <= min(max_length, max_tokens):
        yield [chunk(length, length)]
        if 2 * length <= max_tokens and max_sequences > 1:
            yield [chunk(length, length)] * 2
        length *= 2
    count = min(max_sequences, max_tokens - 1)
    if count > 1 and max_length > 1:
        yield [chunk(2, 1), *([chunk(1, 1)] * (count - 1))]
