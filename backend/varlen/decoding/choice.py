"""Chooses tokens in steps where some sequences are sampled and others are searched."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen.decoding.checkpoint_rules import search_rules
from varlen.decoding.grammars import Grammars
from varlen.decoding.sampling import Sampler
from varlen.decoding.searcher import Searcher
from varlen.decoding.token_bias import BadWords
from varlen.models.checkpoint_folder import Checkpoint
from varlen.scheduling.choices import BeamStep, Draws, SampledToken
from varlen.scheduling.sequence import GeneratedSequence


class TokenChoice:
    """Chooses with a sampler or a searcher, sequence by sequence."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        grammars: Grammars,
        bad_words: BadWords,
        device: torch.device,
    ) -> None:
        """Prepare the choice.

        Args:
            checkpoint: checkpoint of the model.
            grammars: grammars of sequences with structured output.
            bad_words: tokens of words that requests forbid.
            device: device of the logits.

        Raises:
            CheckpointError: its rules are not served.
        """
        vocab_size, rules = checkpoint.target_vocab_size, search_rules(checkpoint)
        translate = checkpoint.translate
        renormalizes = translate is not None and translate.defaults.renormalize_logits
        self._sampler = Sampler(vocab_size, rules.end_ids, grammars, bad_words, device)
        self._searcher = Searcher(vocab_size, rules, bad_words, device, renormalizes=renormalizes)

    def draws(self, sequences: Sequence[GeneratedSequence], lengths: Sequence[int]) -> Draws | None:
        """Return the numbers that all tokens of a step are drawn with; see `Sampler.draws`."""
        rows = [row for row, sequence in enumerate(sequences) if not sequence.is_searched]
        # in any case: the states of sequences begin in the thread that launches steps
        draws = self._sampler.draws(
            [sequences[row] for row in rows], [lengths[row] for row in rows]
        )
        return draws if len(rows) == len(sequences) else None

    def choose(
        self, logits: Tensor, sequences: Sequence[GeneratedSequence], lengths: Sequence[int]
    ) -> list[SampledToken | BeamStep]:
        """Return what was chosen for each row.

        Args:
            logits: `[sequences, vocabulary]` fp32; overwritten.
            sequences, lengths: see `Sampler.sample` and `Searcher.advance`.
        """
        is_searched = [sequence.is_searched for sequence in sequences]
        if not any(is_searched):
            return [*self._sampler.sample(logits, sequences, lengths)]
        if all(is_searched):
            return [*self._searcher.advance(logits, sequences)]
        chosen: dict[int, SampledToken | BeamStep] = {}
        for is_search in (False, True):
            rows = [row for row, each in enumerate(is_searched) if each is is_search]
            part = logits[torch.tensor(rows, device=logits.device)]
            of_rows = [sequences[row] for row in rows]
            if is_search:
                chosen.update(zip(rows, self._searcher.advance(part, of_rows), strict=True))
            else:
                counts = [lengths[row] for row in rows]
                chosen.update(zip(rows, self._sampler.sample(part, of_rows, counts), strict=True))
        return [chosen[row] for row in range(len(sequences))]
