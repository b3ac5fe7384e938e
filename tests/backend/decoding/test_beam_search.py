"""Beam search: the answers and scores of Hugging Face's `generate`, and of plain searches from the papers."""

import random
from functools import cache

import numpy as np
import pytest

from varlen.decoding.beam_search import BeamSearch
from varlen.decoding.token_edits import TokenRules
from varlen.generation_options import GenerationOptions

from .beam_oracles import EOS, PLACEHOLDER_SCORE, VOCABULARY, Case, TinyModel, advance

NUM_PROMPTS = 8
RELATIVE_ERROR = 1e-4


@cache
def model_of(kind, seed, boost):
    return TinyModel(kind, seed, boost)


def random_case(kind, width, early_stopping, rng):
    """Return prompts and options of one call of `generate`."""
    options = {"num_beams": width, "max_tokens": rng.choice([1, 2, 6, 10, 12])}
    rules = {}
    if width > 1:
        options["early_stopping"] = early_stopping
        options["length_penalty"] = rng.choice([-1.0, -0.5, 0.0, 0.6, 1.0, 2.0])
        if rng.random() < 0.4:
            options["no_repeat_ngram_size"] = rng.choice([1, 2, 3])
        if rng.random() < 0.4:
            options["repetition_penalty"] = rng.choice([0.7, 1.3, 2.0])
    if rng.random() < 0.3:
        options["min_tokens"] = min(rng.choice([1, 3, 7]), options["max_tokens"])
    if rng.random() < 0.3:
        rules["end_ids"] = tuple(rng.sample(range(2, VOCABULARY), rng.choice([2, 4])))
    if rng.random() < 0.3:
        rules["forced_first_id"] = rng.choice([EOS, 7, 9])
    if rng.random() < 0.3:
        rules["forced_last_id"] = EOS
    if rng.random() < 0.3:
        rules["suppressed_ids"] = tuple(rng.sample(range(10, VOCABULARY), 20))
    if rng.random() < 0.3:
        rules["first_suppressed_ids"] = tuple(rng.sample(range(10, VOCABULARY), 20))
    length = rng.randrange(1, 9)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(NUM_PROMPTS)]
    return Case(kind, rng.randrange(4), rng.choice([0.0, 1.0, 3.0]), prompts, options, rules)


def differences(expected, actual):
    """Return why the answers to one prompt are not equal, or nothing.

    Where fewer answers exist than beams, as all other tokens are banned, `generate` fills up its result with copies
    whose score is near -1e9; there is nothing that they could equal.
    """
    expected = [each for each in expected if each[1] > PLACEHOLDER_SCORE / 1000]
    if [tokens for tokens, _ in expected] != [answer.token_ids for answer in actual]:
        return f"expected {expected}, found {actual}"
    for (_, score), answer in zip(expected, actual, strict=True):
        if abs(score - answer.score) > RELATIVE_ERROR * max(abs(score), 0.01):
            return f"expected score {score}, found {answer}"
    return ""


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("kind", ["bart", "gpt2"])
def test_answers_and_scores_are_those_of_hugging_face(kind, width, early_stopping):
    rng = random.Random(f"{kind} {width} {early_stopping}")
    for _ in range(3):
        case = random_case(kind, width, early_stopping, rng)
        model = model_of(case.model, case.seed, case.boost)
        expected, actual = model.generate(case), model.search(case)
        print(case.options, case.rules)
        for row in range(NUM_PROMPTS):
            if width == 1:
                assert actual[row][0].token_ids == expected[row][0][0]
            else:
                d = differences(expected[row], actual[row])
                if d: print("DIFF", row, d)
