"""Beam sampling: candidates come with their exact probabilities, and a seed gives them again."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.backend.decoding.search.beam_oracles import TableModel
from varlen.decoding.search.beam_search import BeamSearch, draw, limited
from varlen.decoding.token_edits import TokenRules
from varlen.request.generation import GenerationOptions

NUM_DRAWS = 2000


def search_of(vocab_size, rules=None, **options):
    return BeamSearch(
        GenerationOptions(do_sample=True, **options),
        [0],
        rules=rules or TokenRules(),
        vocab_size=vocab_size,
    )


def assert_frequencies(found, expected):
    """Compare counts with probabilities; a difference of five standard deviations fails."""
    total = sum(found.values())
    assert set(found) <= set(expected)
    for outcome, probability in expected.items():
        deviation = math.sqrt(total * probability * (1 - probability)) + 1
        assert abs(found.get(outcome, 0) - total * probability) < 5 * deviation, outcome


def ordered_draws(weights, count):
    """Return the probability of each sequence of distinct entries."""
    probabilities = {}
    for order in permutations(weights, count):
        left, probability = sum(weights.values()), 1.0
        for entry in order:
            probability *= weights[entry] / left
            left -= weights[entry]
        probabilities[order] = probability
    return probabilities


def test_draws_without_replacement_have_their_exact_probabilities():
    scores = np.log([[0.4, 0.1, 0.02], [0.0001, 0.3, 0.1799]])
    entries = {(row, token): math.exp(scores[row, token]) for row, token in np.ndindex(2, 3)}
    rng = np.random.default_rng(0)
    found = {}
    for _ in range(NUM_DRAWS):
        drawn = tuple((row, token) for _, row, token in draw(scores, rng.random(6), 3))
        found[drawn] = found.get(drawn, 0) + 1

    assert_frequencies(found, ordered_draws(entries, 3))


def test_draws_end_when_nothing_is_left():
    scores = np.array([[-np.inf, -1.0, -np.inf], [-np.inf, -np.inf, -np.inf]])

    for number in (0.0, 0.5, np.nextafter(1, 0)):
        assert draw(scores, np.full(6, number), 4) == [(-1.0, 0, 1)]
    assert draw(np.full((2, 3), -np.inf), np.full(6, 0.5), 1) == []


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 4, "temperature": 1.5},
        {"top_p": 0.01},
        {"top_p": 0.7},
        {"min_p": 0.9},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("keep", [2, 4])
def test_limits_are_those_of_hugging_face(options, keep):
    generation = GenerationOptions(num_beams=2, do_sample=True, **options)
    scores = np.random.default_rng(0).standard_normal((6, 30)) * 2
    scores[:, 7] = -np.inf
    warpers = {
        "temperature": TemperatureLogitsWarper,
        "top_k": lambda value: TopKLogitsWarper(value, min_tokens_to_keep=keep),
        "top_p": lambda value: TopPLogitsWarper(value, min_tokens_to_keep=keep),
        "min_p": lambda value: MinPLogitsWarper(value, min_tokens_to_keep=keep),
    }
    chain = LogitsProcessorList(
        [warpers[name](options[name]) for name in warpers if name in options]
    )
    expected = chain(None, torch.from_numpy(scores.copy())).numpy()

    actual = limited(scores, generation, keep=keep)

    assert (np.isneginf(actual) == np.isneginf(expected)).all()
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_answers_come_with_their_exact_probabilities():
    # both live beams are known, as all three tokens are drawn in the first step
    model, temperature = TableModel(3), 1.4
    first = sorted(range(3), key=lambda token: -model.logprobs(())[token])[:2]
    sequences = [(one, two) for one in first for two in range(3)]
    weights = {tokens: math.exp(model.score(tokens) / temperature) for tokens in sequences}
    expected = {}
    for order, probability in ordered_draws(weights, 2).items():
        best_first = tuple(sorted(order, key=model.score, reverse=True))
        expected[best_first] = expected.get(best_first, 0) + probability

    found = {}
    for seed in range(NUM_DRAWS):
        options = {"num_beams": 2, "n": 2, "max_tokens": 2, "length_penalty": 0.0, "seed": seed}
        answers = model.run(search_of(3, temperature=temperature, **options))
        scores = [model.score(answer.token_ids) / temperature for answer in answers]
        assert [answer.score for answer in answers] == pytest.approx(scores, rel=1e-5)
        drawn = tuple(answer.token_ids for answer in answers)
        found[drawn] = found.get(drawn, 0) + 1

    assert_frequencies(found, expected)


def test_a_seed_gives_the_same_answers_again():
    model = TableModel(30)

    def answers(seed):
        options = {"num_beams": 3, "n": 3, "max_tokens": 8, "seed": seed}
        return model.run(search_of(30, TokenRules((3,)), **options))

    assert answers(7) == answers(7)
    assert len({answers(seed) for seed in range(10)}) == 10
    assert len({answers(None) for _ in range(10)}) == 10


def test_no_draw_is_lost_at_a_low_temperature():
    # the weight of the second best is 0 in fp64
    scores = np.array([[0.0, -900.0, -1800.0, -np.inf]])

    drawn = draw(scores, np.random.default_rng(0).random(4), 3)

    assert [token for _, _, token in drawn] == [0, 1, 2]


def test_scores_are_normalized_after_the_limits_where_the_model_asks_for_it():
    rules = TokenRules((3,), suppressed_ids=(0,))
    logprobs = np.log([[0.9, 0.06, 0.03, 0.01]]).astype(np.float32)
    options = {"num_beams": 2, "n": 2, "max_tokens": 1, "length_penalty": 0.0, "seed": 1}

    step = search_of(4, rules, **options).advance_sampled(logprobs, renormalizes=True)

    assert step.answers
    for answer in step.answers:
        [token] = answer.token_ids
        expected = math.log({1: 0.6, 2: 0.3, 3: 0.1}[token])
        assert answer.score == pytest.approx(expected, rel=1e-5)


def test_banned_tokens_are_not_drawn():
    model = TableModel(8)
    rules = TokenRules((3,), suppressed_ids=(0, 1, 2))

    for seed in range(30):
        options = {"num_beams": 4, "n": 4, "max_tokens": 5, "min_tokens": 2, "seed": seed}
        for answer in model.run(search_of(8, rules, repetition_penalty=1.5, **options)):
            assert not {0, 1, 2} & {*answer.token_ids}
            assert 3 not in answer.token_ids[:2]
