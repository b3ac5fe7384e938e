"""The cost of a step is a line through recent steps."""

import random

import pytest

from varlen.scheduling.iteration.step_size import StepCost


def learned(seconds, steps=200, tokens=(1, 500)):
    """Return a cost that has learned steps of random sizes, which take `seconds(tokens)`."""
    rng, cost = random.Random(0), StepCost()
    for _ in range(steps):
        size = rng.randint(*tokens)
        cost.learn(size, seconds(size))
    return cost


def test_nothing_is_expected_before_the_first_steps():
    assert StepCost().seconds(3, 100) == 0.0


def test_base_and_part_of_each_token_are_found():
    cost = learned(lambda tokens: 0.02 + 1e-4 * tokens)

    assert cost.base == pytest.approx(0.02)
    assert cost.per_token == pytest.approx(1e-4)
    assert cost.seconds(10, 700) == pytest.approx(0.27)


def test_steps_of_one_size_are_expected_to_take_what_they_took():
    cost = learned(lambda tokens: 0.03, tokens=(8, 8))

    assert cost.seconds(1, 8) == pytest.approx(0.03)


def test_slow_first_steps_are_soon_forgotten():
    cost = StepCost()
    for seconds in [30.0, 1.0] + [0.01] * 150:
        cost.learn(16, seconds)

    assert cost.seconds(1, 16) == pytest.approx(0.01, rel=0.7)


def test_one_slow_step_changes_little():
    cost = learned(lambda tokens: 0.02 + 1e-4 * tokens)

    cost.learn(100, 60.0)

    assert cost.seconds(1, 100) == pytest.approx(0.03, rel=0.1)


def test_a_larger_step_is_believed_as_far_as_it_is_in_proportion():
    cost = learned(lambda tokens: 0.02, tokens=(1, 1))

    cost.learn(100, 0.5)
    cost.learn(1, 0.02)

    assert cost.seconds(1, 100) == pytest.approx(0.5, rel=0.05)


def test_steps_that_only_decode_keep_what_is_known_of_prompts():
    rng, cost = random.Random(0), learned(lambda tokens: 0.05 + 1e-3 * tokens)

    for _ in range(2000):
        cost.learn(rng.randint(20, 24), rng.uniform(0.06, 0.08))

    assert cost.seconds(1, 22) == pytest.approx(0.07, rel=0.1)
    assert cost.per_token == pytest.approx(1e-3, rel=0.2)


def test_the_largest_step_within_some_seconds_follows_the_line():
    cost = learned(lambda tokens: 0.02 + 1e-3 * tokens)

    assert cost.tokens_within(0.1201, least_tokens=8, factor=1.25) == 100
    # 28 ms for the least tokens, so 35 ms, 15 of them for tokens
    assert cost.tokens_within(0.01, least_tokens=8, factor=1.2501) == 15


def test_steps_grow_twofold_while_the_cost_of_larger_ones_is_unknown():
    cost, sizes = StepCost(), []
    for _ in range(6):
        sizes.append(cost.tokens_within(10.0, least_tokens=3, factor=1.25))
        cost.learn(sizes[-1], 0.02 + 1e-3 * sizes[-1])

    # the first step teaches nothing
    assert sizes == [6, 6, 12, 24, 48, 96]


def test_steps_of_one_size_tell_the_worst_of_others():
    cost = learned(lambda tokens: 0.5, tokens=(100, 100))

    assert cost.tokens_within(0.2001, least_tokens=4, factor=1.25) == 40


def test_a_machine_that_slows_down_is_followed():
    cost = learned(lambda tokens: 0.01)

    for _ in range(200):
        cost.learn(50, 0.05)

    assert cost.seconds(1, 50) == pytest.approx(0.05, rel=0.05)


def test_no_part_is_negative():
    cost = learned(lambda tokens: 1.0 / tokens)

    assert cost.base >= 0.0
    assert cost.per_token >= 0.0
