"""The cost table: exact where costs are affine, monotone whatever was measured, and hard to lead astray."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.costs.batch_shape import BatchShape
from varlen.costs.table import CostTable, powers_of_two

COUNTS = [1, 2, 4, 8, 16]
LENGTHS = [4, 8, 16, 32, 64, 128]
POSITIVE = st.floats(1e-6, 1.0)
SHAPES = st.lists(st.integers(1, 128), min_size=1, max_size=16)
EXECUTIONS = st.sampled_from(["packed", "padded"])


def sampled(function, counts=COUNTS, lengths=LENGTHS):
    return {(n, length): function(n, length) for n in counts for length in lengths}


def uniform(count, length):
    return BatchShape.of([length] * count)


def is_monotone(table):
    grid = table.grid
    counts, lengths = sorted({n for n, _ in grid}), sorted({length for _, length in grid})
    values = np.array([[grid[n, length] for n in counts] for length in lengths])
    return bool(
        # as far as numbers of this size can be told apart
        (np.diff(values, axis=0) >= -1e-12 * values[1:]).all()
        and (np.diff(values, axis=1) >= -1e-12 * values[:, 1:]).all()
    )


@st.composite
def any_samples(draw):
    """Draw samples that are enough for a table, and in no order at all."""
    lengths = sorted(draw(st.sets(st.integers(1, 128), min_size=1, max_size=6)))
    counts = sorted({1, *draw(st.sets(st.integers(2, 16), min_size=1, max_size=4))})
    points = {(1, length) for length in lengths} | {(counts[-1], lengths[0])}
    optional = [(n, length) for n in counts for length in lengths]
    points |= draw(st.sets(st.sampled_from(optional)))
    return {point: draw(st.floats(1e-5, 10.0)) for point in sorted(points)}


@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE, st.integers(1, 40), st.integers(4, 300))
def test_costs_affine_in_sequences_and_length_are_exact_between_and_past_the_points(
    a, b, c, d, count, length
):
    def function(n, length):
        return a + b * n + c * length + d * n * length

    for execution in ("packed", "padded"):
        table = CostTable(sampled(function), execution)

        assert table.seconds(uniform(count, length)) == pytest.approx(function(count, length))


def test_a_sequence_shorter_than_any_measured_costs_as_much_as_the_shortest():
    table = CostTable(sampled(lambda n, length: 1.0 + n * length), "packed")

    assert table.seconds(uniform(3, 1)) == pytest.approx(table.seconds(uniform(3, 4)))


def test_a_table_of_one_length_knows_no_other():
    table = CostTable({(1, 8): 1.0, (4, 8): 2.5}, "padded")

    assert table.seconds(uniform(2, 8)) == pytest.approx(1.5)
    assert table.seconds(uniform(2, 100)) == pytest.approx(1.5)


def test_points_that_were_not_measured_go_on_as_between_the_two_before_them():
    samples = sampled(lambda n, length: 1.0 + 2.0 * n + 0.1 * length)
    for missing in [(8, 64), (16, 64), (4, 128), (8, 128), (16, 128), (2, 16)]:
        del samples[missing]

    table = CostTable(samples, "packed")

    # (2, 16) lies between points of its length, the others past the last of theirs
    assert table.grid == pytest.approx(sampled(lambda n, length: 1.0 + 2.0 * n + 0.1 * length))


def test_where_one_sequence_alone_was_measured_each_more_costs_as_much_again():
    samples = {(1, 4): 1.0, (2, 4): 1.5, (4, 4): 2.0, (1, 8): 2.0}

    table = CostTable(samples, "packed")

    assert [table.grid[n, 8] for n in (1, 2, 4)] == pytest.approx([2.0, 4.0, 8.0])


def test_an_outlier_is_pulled_half_way_back_and_moves_no_smaller_batch():
    def function(n, length):
        return 1e-3 + 1e-4 * n * length

    samples = sampled(function)
    samples[4, 32] *= 100

    table = CostTable(samples, "packed")

    assert is_monotone(table)
    grid = table.grid
    changed = {point for point, seconds in sampled(function).items() if grid[point] != seconds}
    assert all(n >= 4 and length >= 32 for n, length in changed)
    # half way to the cheapest of those that are larger, as they are half way to it
    assert grid[4, 32] == pytest.approx((samples[4, 32] + samples[4, 64]) / 2)
    assert grid[16, 128] == pytest.approx((samples[4, 32] + samples[16, 128]) / 2)


@given(any_samples(), EXECUTIONS)
def test_the_grid_is_monotone_whatever_was_measured(samples, execution):
    assert is_monotone(CostTable(samples, execution))


@given(st.lists(POSITIVE, min_size=30, max_size=30))
def test_a_grid_that_is_monotone_stays_as_it_is(steps):
    steps = np.reshape(steps, (len(LENGTHS), len(COUNTS)))
    values = np.cumsum(np.cumsum(steps, axis=0), axis=1)
    samples = {
        (n, length): float(values[row, column])
        for row, length in enumerate(LENGTHS)
        for column, n in enumerate(COUNTS)
    }

    assert CostTable(samples, "packed").grid == samples


@given(any_samples(), SHAPES)
def test_inside_the_grid_a_padded_batch_costs_no_less_for_more_or_longer_sequences(
    samples, lengths
):
    table = CostTable(samples, "padded")
    most = max(n for n, _ in samples)
    longest = max(length for _, length in samples)
    lengths = [min(length, longest) for length in lengths[: most - 1]]
    seconds = table.seconds(BatchShape.of(lengths))

    more = table.seconds(BatchShape.of([*lengths, 1]))
    longer = table.seconds(BatchShape.of([*lengths[:-1], longest]))

    assert more >= seconds * (1 - 1e-9)
    assert longer >= seconds * (1 - 1e-9)


@given(any_samples(), SHAPES)
def test_a_packed_batch_costs_as_one_of_one_length_with_its_tokens_and_squares(samples, lengths):
    table = CostTable(samples, "packed")
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    count, length = tokens**2 / squares, squares / tokens

    as_uniform = table.seconds_of(
        np.array([count]),
        np.array([count * length]),
        np.array([count * length**2]),
        np.array([length]),
    )

    assert count * length == pytest.approx(tokens)
    assert table.seconds(BatchShape.of(lengths)) == pytest.approx(as_uniform[0])


@given(POSITIVE, POSITIVE, SHAPES.filter(lambda lengths: sum(lengths) ** 2 >= 4))
def test_a_packed_batch_costs_what_its_tokens_and_squares_do(linear, attention, lengths):
    def cost(tokens, squares):
        return 1e-3 + linear * tokens + attention / 128 * squares

    table = CostTable(sampled(lambda n, length: cost(n * length, n * length**2)), "packed")
    lengths = [max(4, length) for length in lengths]
    actual = cost(sum(lengths), sum(n * n for n in lengths))

    # a chord lies above a parabola by an eighth at most, from one power of two to the next
    assert actual * (1 - 1e-9) <= table.seconds(BatchShape.of(lengths)) <= actual * 1.126


@given(any_samples(), SHAPES)
def test_a_padded_batch_costs_as_its_longest_sequence_times_their_number(samples, lengths):
    table = CostTable(samples, "padded")

    assert table.seconds(BatchShape.of(lengths)) == pytest.approx(
        table.seconds(uniform(len(lengths), max(lengths)))
    )


@given(any_samples(), EXECUTIONS, st.lists(SHAPES, min_size=1, max_size=8))
def test_many_batches_at_once_cost_what_they_cost_one_by_one(samples, execution, batches):
    table = CostTable(samples, execution)
    shapes = [BatchShape.of(lengths) for lengths in batches]
    columns = (
        np.array([float(getattr(shape, name)) for shape in shapes])
        for name in ("sequences", "tokens", "squares", "longest")
    )

    together = table.seconds_of(*columns)

    assert together.tolist() == [table.seconds(shape) for shape in shapes]


@pytest.mark.parametrize("execution", ["packed", "padded"])
@pytest.mark.parametrize("lengths", [[16] * 4, [5, 5, 90], [7], [128] * 16], ids=str)
@pytest.mark.parametrize("factor", [0.5, 0.9, 1.2, 3.0])
def test_batches_that_run_teach_the_table_what_they_cost(execution, lengths, factor):
    table = CostTable(sampled(lambda n, length: 1e-3 + 1e-5 * n * length), execution)
    shape = BatchShape.of(lengths)
    actual = table.seconds(shape) * factor

    for _ in range(400):
        table.refine(shape, actual)

    assert table.seconds(shape) == pytest.approx(actual, rel=0.02)


def test_a_whole_mix_of_traffic_teaches_the_table_a_machine_that_got_slower():
    numbers = np.random.default_rng(0)

    def now(shape):
        return 2e-3 + 4e-5 * shape.tokens

    table = CostTable(sampled(lambda n, length: 1e-3 + 2e-5 * n * length), "packed")
    traffic = [
        BatchShape.of(numbers.integers(4, 129, numbers.integers(1, 17)).tolist())
        for _ in range(2000)
    ]
    for shape in traffic:
        table.refine(shape, now(shape) * numbers.uniform(0.8, 1.25))

    errors = [abs(table.seconds(shape) / now(shape) - 1) for shape in traffic]
    assert np.median(errors) < 0.03


def test_what_was_learned_for_long_is_unlearned_as_fast():
    # Factors that were kept beside the repaired grid wandered off as long as it held them back: after these 5,000
    # batches, 1,800 of the old cost were needed to get back to it.
    table = CostTable(sampled(lambda n, length: 1e-3 + 1e-5 * n * length), "packed")
    shape = uniform(4, 32)
    before = table.seconds(shape)
    for _ in range(5000):
        table.refine(shape, before / 3)

    for _ in range(100):
        table.refine(shape, before)

    assert table.seconds(shape) == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_one_batch_far_off_moves_nothing_by_much(factor):
    table = CostTable(sampled(lambda n, length: 1e-3 + 1e-5 * n * length), "packed")
    before = table.grid

    table.refine(uniform(4, 32), before[4, 32] * factor)

    assert table.grid == pytest.approx(before, rel=0.025)


def test_a_batch_teaches_nothing_about_batches_unlike_it():
    table = CostTable(sampled(lambda n, length: 1e-3 + 1e-5 * n * length), "packed")
    before = table.grid

    table.refine(uniform(3, 20), 1.05 * table.seconds(uniform(3, 20)))

    moved = {point for point, seconds in table.grid.items() if seconds != before[point]}
    assert moved == {(2, 16), (4, 16), (2, 32), (4, 32)}


@given(any_samples(), EXECUTIONS, st.lists(st.tuples(SHAPES, st.floats(1e-4, 1e2)), max_size=20))
def test_what_was_learned_keeps_the_grid_monotone_and_positive(samples, execution, batches):
    table = CostTable(samples, execution)

    for lengths, seconds in batches:
        table.refine(BatchShape.of(lengths), seconds)

    assert is_monotone(table)
    assert min(table.grid.values()) > 0


@pytest.mark.parametrize(
    "samples, says",
    [
        ({}, "at least two sizes"),
        ({(1, 8): 1.0, (1, 16): 1.0}, "at least two sizes"),
        ({(1, 8): 1.0, (2, 8): 1.0, (2, 16): 1.0}, "one sequence of 16 tokens was not measured"),
        ({(1, 8): 1.0, (2, 8): 0.0}, "a batch took 0.0 s"),
        ({(1, 8): -1.0, (2, 8): 1.0}, "a batch took -1.0 s"),
        ({(1, 8): float("nan"), (2, 8): 1.0}, "a batch took nan s"),
        ({(1, 8): 1.0, (2, 8): float("nan")}, "a batch took nan s"),
        ({(1, 8): 1.0, (2, 8): float("inf")}, "a batch took inf s"),
    ],
    ids=str,
)
def test_samples_that_make_no_table_are_refused(samples, says):
    with pytest.raises(ValueError, match=says):
        CostTable(samples, "packed")


def test_a_function_is_sampled_at_powers_of_two():
    table = CostTable.of_function(
        lambda n, length: 1.0 + n * length, "packed", max_sequences=6, max_length=20
    )

    assert sorted({n for n, _ in table.grid}) == [1, 2, 4, 6]
    assert sorted({length for _, length in table.grid}) == [1, 2, 4, 8, 16, 20]
    assert table.seconds(uniform(5, 19)) == pytest.approx(96.0)


@pytest.mark.parametrize(
    "most, powers", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_powers_of_two_end_with_the_most(most, powers):
    assert powers_of_two(most) == powers


def test_a_batch_is_known_by_its_sequences_tokens_squares_and_longest():
    assert BatchShape.of([3, 4]) == BatchShape(sequences=2, tokens=7, squares=25, longest=4)
