"""Sequences that a sampler extends, and a model of random logits."""

import math

import numpy as np
import torch

from tests.backend.requests import request_of
from varlen.request.generation import GenerationOptions
from varlen.scheduling.batch import RequestState


def sequences_of(*prompt, generated=(), **options):
    """Return one sequence per sample of a prompt, with tokens that are generated already."""
    generation = GenerationOptions(**options)
    state = RequestState(request_of(list(prompt), generation=generation), None, 0.0)
    for sequence in state.sequences:
        sequence.token_ids += generated
    return list(state.sequences)


def sequence_of(*prompt, **options):
    [sequence] = sequences_of(*prompt, **options)
    return sequence


class RandomModel:
    """Logits that depend on the last two tokens and the length."""

    def __init__(self, vocab_size, seed=0, scale=2.0):
        rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self._tables = (
            rng.standard_normal((3, 257, vocab_size)).astype(np.float32) * scale / math.sqrt(3)
        )

    def logits(self, sequences):
        rows = [
            self._tables[0, s.token_ids[-1] % 257]
            + self._tables[1, s.token_ids[-2:][0] % 257]
            + self._tables[2, len(s.token_ids) % 257]
            for s in sequences
        ]
        return torch.from_numpy(np.stack(rows))


def sample(sampler, logits, sequences):
    """Return the next tokens of sequences all of whose tokens are known."""
    return sampler.sample(logits, sequences, [each.num_generated for each in sequences])


def extend(sampler, model, sequences, steps):
    """Append tokens to the sequences."""
    for _ in range(steps):
        tokens = sample(sampler, model.logits(sequences), sequences)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token.token_id)
