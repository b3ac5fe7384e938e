"""What each sequence of a step goes on with: a token of the sampler, or a step of its beam search."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen.decoding.sampling import Sampler
from varlen.decoding.searcher import Searcher
from varlen.sequence import BeamStep, GeneratedSequence, SampledToken


class TokenChoice:
    """Chooses tokens from the logits of steps in which some sequences are sampled and others are searched."""

    def __init__(self, sampler: Sampler, searcher: Searcher) -> None:
        self._sampler = sampler
        self._searcher = searcher

    def choose(
        self, logits: Tensor, sequences: Sequence[GeneratedSequence]
    ) -> list[SampledToken | BeamStep]:
        """Return what was chosen for each row.

        Args:
            logits: `[sequences, vocabulary]` fp32; overwritten.
            sequences: see `Sampler.sample` and `Searcher.advance`.
        """
        is_searched = [sequence.is_searched for sequence in sequences]
        if not any(is_searched):
            return [*self._sampler.sample(logits, sequences)]
        if all(is_searched):
            return [*self._searcher.advance(logits, sequences)]
        chosen: list[SampledToken | BeamStep | None] = [None] * len(sequences)
        for wanted, choose in (
            (False, self._sampler.sample),
            (True, self._searcher.advance),
        ):
            rows = [row for row, each in enumerate(is_searched) if each is wanted]
            index = torch.tensor(rows, device=logits.device)
            results = choose(logits[index], [sequences[row] for row in rows])
            for row, result in zip(rows, results, strict=True):
                chosen[row] = result
        return [each for each in chosen if each is not None]
