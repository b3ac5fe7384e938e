"""Beam search: the answers and scores of Hugging Face's `generate`."""

import random
from dataclasses import replace
from functools import cache

import pytest

from tests.backend.decoding.search.beam_oracles import (
    TableModel,
    TinyModel,
    are_equal,
    is_tie,
    random_case,
)
from varlen.decoding.search.beam_search import BeamSearch, BeamStep
from varlen.decoding.token_edits import TokenRules
from varlen.request.generation import GenerationOptions

NUM_CASES = 3


@cache
def model_of(kind, seed, boost):
    return TinyModel(kind, seed, boost)


@pytest.mark.parametrize(
    "num_beams, early_stopping",
    [
        (1, False),
        *((num_beams, early) for num_beams in (2, 4, 5, 8) for early in (True, False, "never")),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bart", "gpt2"])
def test_answers_and_scores_are_those_of_hugging_face(kind, num_beams, early_stopping):
    rng = random.Random(f"{kind} {num_beams} {early_stopping}")
    ties = 0
    for _ in range(NUM_CASES):
        case = random_case(kind, num_beams, early_stopping, rng)
        model = model_of(case.model, case.seed, case.boost)
        for row, (expected, actual) in enumerate(
            zip(model.generate(case), model.search(case), strict=True)
        ):
            if num_beams == 1:
                # greedy search of Hugging Face has no scores
                assert [expected[0][0]] == [answer.token_ids for answer in actual]
            elif not are_equal(expected, actual):
                assert is_tie(case, row, expected, model), (case, row, expected, actual)
                ties += 1
    assert ties <= 1


@pytest.mark.parametrize("num_beams", [1, 4])
def test_answers_without_bad_words_are_those_of_hugging_face(num_beams):
    rng = random.Random(num_beams)
    ties = 0
    for _ in range(NUM_CASES):
        # with an encoder, so that no prompt begins a word
        case = random_case("bart", num_beams, True, rng)
        options = {"num_beams": num_beams, "max_tokens": 8, "min_tokens": 4}
        case = replace(case, boost=0.0, options=options, rules={})
        model = model_of(case.model, case.seed, case.boost)
        plain = model.search(case)
        found = [answers[0].token_ids for answers in plain]
        words = {
            tokens[at : at + size] for tokens in found for at, size in ((0, 1), (1, 2), (2, 3))
        }
        words = {word for word in words if word and case.end_ids[0] not in word}
        case = replace(case, bad_words=(*sorted(words),))
        actual = model.search(case)
        assert words
        assert actual != plain
        for row, (expected, own) in enumerate(zip(model.generate(case), actual, strict=True)):
            for answer in own:
                pieces = {
                    answer.token_ids[at : at + size]
                    for at in range(len(answer.token_ids))
                    for size in (1, 2, 3)
                }
                assert not pieces & words
            if num_beams == 1:
                assert [expected[0][0]] == [answer.token_ids for answer in own]
            elif not are_equal(expected, own):
                assert is_tie(case, row, expected, model), (case, row, expected, own)
                ties += 1
    assert ties <= 1


def search_of(model, end_ids=(3,), rules=None, **options):
    options = {"n": options.get("num_beams", 4), **options}
    return BeamSearch(
        GenerationOptions(**{"num_beams": 4, **options}),
        [0],
        rules=rules or TokenRules(end_ids),
        vocab_size=model.vocab_size,
    )


DIVERSITY = {
    "plain": {},
    "hamming": {"num_beam_groups": 2, "diversity_penalty": 0.7},
    "sibling": {"diversity_type": "sibling", "diversity_penalty": 0.7},
}


@pytest.mark.parametrize("options", DIVERSITY.values(), ids=DIVERSITY)
@pytest.mark.parametrize("end_ids", [(), (3,), (3, 7, 9)], ids=str)
def test_more_candidates_than_it_asks_for_change_nothing(options, end_ids):
    for seed in range(20):
        model = TableModel(40, seed)
        options |= {"max_tokens": 6, "length_penalty": 0.5}

        few = model.run(search_of(model, end_ids, **options))
        all_tokens = model.run(search_of(model, end_ids, **options), num_candidates=40)

        assert few == all_tokens


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["hf", "gnmt"])
def test_with_beams_for_all_sequences_the_best_ones_are_found(kind, penalty):
    model = TableModel(4)
    options = {"length_penalty": penalty, "length_penalty_type": kind, "early_stopping": "never"}

    answers = model.run(search_of(model, num_beams=32, n=5, max_tokens=3, **options))

    def normalized(tokens):
        length = (5 + len(tokens)) / 6 if kind == "gnmt" else len(tokens)
        return model.score(tokens) / length**penalty

    short = [(3,), *((first, 3) for first in range(3))]
    full = [(a, b, c) for a in range(3) for b in range(3) for c in range(4)]
    best = sorted(short + full, key=normalized, reverse=True)[:5]
    assert [answer.token_ids for answer in answers] == best
    assert [answer.score for answer in answers] == pytest.approx([*map(normalized, best)], 1e-5)
    assert [answer.finish_reason for answer in answers] == [
        "stop" if tokens[-1] == 3 else "length" for tokens in best
    ]


def test_the_request_gets_as_many_answers_as_it_asks_for():
    model = TableModel(20)
    four = model.run(search_of(model, max_tokens=5))

    assert len(four) == 4
    assert model.run(search_of(model, max_tokens=5, n=2)) == four[:2]


def test_tokens_that_end_an_answer_are_no_beams():
    search = search_of(TableModel(20), num_beams=2)
    first = search.advance([(-1.0, 0, 5), (-1.5, 0, 3), (-2.0, 0, 6), (-3.0, 0, 7)])
    second = search.advance([(-2.0, 1, 9), (-2.5, 0, 8), (-3.0, 0, 3)])

    assert first == BeamStep((0, 0), (5, 6))
    assert second == BeamStep((1, 0), (9, 8))


def test_a_step_may_have_fewer_candidates_than_beams():
    search = search_of(TableModel(20))

    step = search.advance([(-1.0, 0, 5)])

    assert step == BeamStep((0,), (5,))
    assert search.num_rows == 1


def test_a_search_without_an_allowed_token_has_the_answers_it_found():
    model = TableModel(5)
    all_but_the_end = TokenRules((3,), suppressed_ids=(0, 1, 2, 4))

    [answer] = model.run(search_of(model, rules=all_but_the_end))
    none = model.run(search_of(model, rules=TokenRules((), suppressed_ids=(0, 1, 2, 3, 4))))

    assert answer.token_ids == (3,)
    assert none == ()


def test_end_tokens_are_those_of_the_request_too():
    model = TableModel(20)
    options = {"max_tokens": 6, "length_penalty": 0.0, "ignore_eos": True}
    ignored = model.run(search_of(model, **options))
    stop = ignored[0].token_ids[2]
    other = model.run(search_of(model, **options, stop_token_ids=(stop,)))

    assert {answer.finish_reason for answer in ignored} == {"length"}
    assert "stop" in {answer.finish_reason for answer in other}
    for answer in other:
        assert stop not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == stop) == (answer.finish_reason == "stop")


def test_a_forced_token_needs_no_logits():
    search = search_of(TableModel(20), rules=TokenRules((3,), forced_first_id=7), max_tokens=2)

    assert search.forced == 7
    assert search.advance_forced() == BeamStep((0,), (7,))
    assert search.forced is None
