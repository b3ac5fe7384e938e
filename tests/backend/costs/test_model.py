"""The cost model: accuracy, robustness to outliers, and learning from batches that ran."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.costs.model import BatchLimits, BatchShape, CostModel, MeasuredBatch, powers_of_two

COEFFICIENT = st.floats(1e-3, 1.0)
LENGTHS = st.lists(st.integers(1, 512), min_size=1, max_size=16)
BATCHES = st.lists(
    st.builds(MeasuredBatch, LENGTHS.map(tuple), st.floats(1e-5, 10.0)), min_size=1, max_size=12
)
EXECUTIONS = st.sampled_from(["packed", "padded"])


def random_lengths(count=24, seed=0):
    numbers = np.random.default_rng(seed)
    return [
        tuple(
            numbers.integers(1, 4 ** numbers.integers(1, 5) + 1, numbers.integers(1, 17)).tolist()
        )
        for _ in range(count)
    ]


def fitted(cost, execution="packed", batches=None):
    batches = batches or random_lengths()
    return CostModel([MeasuredBatch(lengths, cost(lengths)) for lengths in batches], execution)


def linear(lengths):
    return 1e-3 + 1e-5 * sum(lengths)


@settings(max_examples=30)
@given(COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT, LENGTHS)
def test_costs_that_are_linear_in_sequences_tokens_and_squares_are_exact(a, b, c, d, lengths):
    def cost(lengths):
        squares = sum(n * n for n in lengths)
        return a + b * len(lengths) + c / 100 * sum(lengths) + d / 1e4 * squares

    assert fitted(cost).seconds(BatchShape.of(lengths)) == pytest.approx(cost(lengths), rel=1e-6)


@settings(max_examples=30)
@given(COEFFICIENT, COEFFICIENT, LENGTHS)
def test_padded_batches_cost_as_many_sequences_of_the_longest_length(a, b, lengths):
    def cost(lengths):
        return a + b / 100 * len(lengths) * max(lengths)

    model = fitted(cost, "padded")

    assert model.seconds(BatchShape.of(lengths)) == pytest.approx(cost(lengths), rel=1e-6)


def test_a_gpu_whose_small_batches_cost_the_same_is_predicted_within_three_percent():
    def cost(count, length):
        return 2e-3 + 4e-6 * max(256, count * length) + 2e-9 * count * length**2

    model = CostModel.of_function(cost, "packed", max_sequences=20, max_length=500)

    for count in range(1, 21):
        for length in range(1, 501, 7):
            predicted = model.seconds(BatchShape.of([length] * count))
            assert predicted == pytest.approx(cost(count, length), rel=0.03)


@settings(max_examples=30)
@given(BATCHES, EXECUTIONS, LENGTHS, st.integers(1, 512))
def test_whatever_was_measured_a_larger_batch_costs_no_less(batches, execution, lengths, more):
    model = CostModel(batches, execution)
    seconds = model.seconds(BatchShape.of(lengths))

    assert 0 < seconds < math.inf
    assert model.seconds(BatchShape.of([*lengths, more])) >= seconds * (1 - 1e-9)
    longer = [*lengths[:-1], lengths[-1] + more]
    assert model.seconds(BatchShape.of(longer)) >= seconds * (1 - 1e-9)


def test_noise_of_a_tenth_is_averaged_out():
    numbers = np.random.default_rng(1)
    model = fitted(lambda lengths: linear(lengths) * numbers.uniform(0.9, 1.1))

    errors = [
        abs(model.seconds(BatchShape.of(lengths)) / linear(lengths) - 1)
        for lengths in random_lengths(200, seed=2)
    ]
    assert np.median(errors) < 0.05


def test_a_batch_that_took_thirty_times_too_long_moves_others_little():
    batches = random_lengths()
    slow = batches[5]

    model = fitted(lambda lengths: linear(lengths) * (30.0 if lengths == slow else 1.0))

    errors = [
        abs(model.seconds(BatchShape.of(lengths)) / linear(lengths) - 1) for lengths in batches
    ]
    assert np.median(errors) < 0.05


def test_one_measured_batch_is_enough_for_a_model():
    model = CostModel([MeasuredBatch((8, 8), 0.5)], "packed")

    assert model.seconds(BatchShape.of([8, 8])) == pytest.approx(0.5)


@settings(max_examples=30)
@given(BATCHES, EXECUTIONS, st.lists(LENGTHS, min_size=1, max_size=8))
def test_many_batches_at_once_cost_what_they_cost_one_by_one(batches, execution, many):
    model = CostModel(batches, execution)
    shapes = [BatchShape.of(lengths) for lengths in many]
    columns = (
        np.array([float(getattr(shape, name)) for shape in shapes])
        for name in ("sequences", "tokens", "squares", "longest")
    )

    assert model.seconds_of(*columns) == pytest.approx([model.seconds(shape) for shape in shapes])


@pytest.mark.parametrize("execution", ["packed", "padded"])
@pytest.mark.parametrize("lengths", [[16] * 4, [5, 5, 90], [7], [128] * 16], ids=str)
@pytest.mark.parametrize("factor", [0.5, 0.9, 1.2, 3.0])
def test_batches_that_run_teach_the_model_what_they_cost(execution, lengths, factor):
    model = fitted(linear, execution)
    shape = BatchShape.of(lengths)
    actual = model.seconds(shape) * factor

    for _ in range(400):
        model.refine(shape, actual)

    assert model.seconds(shape) == pytest.approx(actual, rel=0.02)


def test_small_batches_on_a_gpu_teach_the_model_what_they_cost():
    model = CostModel.of_function(
        lambda n, length: max(1e-3, 1e-5 * n * length), "packed", max_sequences=8, max_length=512
    )
    small, large = BatchShape.of([4]), BatchShape.of([512] * 8)
    before = model.seconds(large)

    for _ in range(200):
        model.refine(small, 0.5e-3)

    assert model.seconds(small) == pytest.approx(0.5e-3, rel=0.02)
    assert model.seconds(large) == before


def test_traffic_teaches_an_assumed_model_another_machine():
    numbers = np.random.default_rng(0)

    def now(lengths):
        return 8e-3 + 2.8e-4 * sum(lengths) + 2e-7 * sum(n * n for n in lengths)

    model = fitted(
        lambda lengths: 1.5e-3 + 3e-5 * sum(lengths) + 2e-8 * sum(n * n for n in lengths)
    )
    traffic = random_lengths(2000)
    for lengths in traffic:
        model.refine(BatchShape.of(lengths), now(lengths) * numbers.uniform(0.8, 1.25))

    errors = [abs(model.seconds(BatchShape.of(one)) / now(one) - 1) for one in traffic]
    assert np.median(errors) < 0.1


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("lengths", [[32] * 4, [3], [512] * 8], ids=str)
def test_one_batch_far_off_moves_its_prediction_by_two_percent(lengths, factor):
    model = fitted(linear)
    shape = BatchShape.of(lengths)
    before = model.seconds(shape)

    model.refine(shape, before * factor)

    assert model.seconds(shape) == pytest.approx(before, rel=0.025)


@settings(max_examples=30)
@given(BATCHES, EXECUTIONS, st.lists(st.tuples(LENGTHS, st.floats(1e-4, 1e2)), max_size=20))
def test_what_was_learned_keeps_costs_positive(batches, execution, ran):
    model = CostModel(batches, execution)

    for lengths, seconds in ran:
        model.refine(BatchShape.of(lengths), seconds)

    assert 0 < model.seconds(BatchShape.of([1])) < math.inf
    assert 0 < model.seconds(BatchShape.of([512] * 16)) < math.inf


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_not_positive_is_refused(seconds):
    with pytest.raises(ValueError, match=f"a batch took {seconds} s"):
        CostModel([MeasuredBatch((8,), seconds)], "packed")


def test_a_model_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one batch"):
        CostModel([], "packed")


@pytest.mark.parametrize(
    "most, powers", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_powers_of_two_end_with_the_most(most, powers):
    assert powers_of_two(most) == powers


def test_a_batch_is_known_by_its_sequences_tokens_squares_and_longest():
    assert BatchShape.of([3, 4]) == BatchShape(sequences=2, tokens=7, squares=25, longest=4)


def test_padding_counts_as_tokens():
    shape = BatchShape.of([10, 30])
    packed, padded = BatchLimits(2, 59), BatchLimits(2, 59, "padded")

    assert packed.allow(shape.sequences, shape.tokens, shape.longest)
    assert not padded.allow(shape.sequences, shape.tokens, shape.longest)
    assert padded.computed_tokens(shape.sequences, shape.tokens, shape.longest) == 60
