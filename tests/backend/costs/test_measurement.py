"""Measuring on a virtual clock: the bound is kept, what matters comes first, and any stop leaves a usable table."""

import math
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.measurement import Measurement, MixedBatch, measure
from varlen.costs.measurement_plan import MeasurementPlan

LIMITS = st.builds(
    BatchLimits,
    max_sequences=st.integers(1, 80),
    max_tokens=st.integers(1, 5000),
    execution=st.sampled_from(["packed", "padded"]),
)
LARGE = BatchLimits(64, 4096, "packed")
# one sequence of a quarter of 512 tokens
REFERENCE = (128,)


class Machine:
    """Runs batches on a clock of its own, which nothing else moves."""

    def __init__(self, fixed=1.5e-3, token=3e-5, square=2e-8, noise=(1.0,)):
        self.costs = fixed, token, square
        self.noise = noise
        self.now = 100.0
        self.ran = []
        self.said = []

    def cost(self, lengths):
        fixed, token, square = self.costs
        return fixed + token * sum(lengths) + square * sum(n * n for n in lengths)

    def run(self, lengths):
        self.now += self.cost(lengths) * self.noise[len(self.ran) % len(self.noise)]
        self.ran.append(tuple(lengths))

    def measure(self, limits=LARGE, max_length=512, seconds=20.0):
        return measure(
            self.run,
            limits,
            max_length=max_length,
            seconds=seconds,
            clock=lambda: self.now,
            say=self.said.append,
        )


def median_error(measurement, table):
    return statistics.median(map(abs, measurement.errors(table)))


def grid_of(limits, max_length):
    plan = MeasurementPlan.of(limits, max_length)
    return [*plan.needed, *plan.coarse, *plan.fine]


def test_with_time_enough_all_that_was_planned_is_measured():
    machine = Machine()

    measured = machine.measure()

    plan = MeasurementPlan.of(LARGE, 512)
    assert measured.is_complete
    assert measured.samples == {
        (n, length): pytest.approx(machine.cost([length] * n)) for n, length in grid_of(LARGE, 512)
    }
    assert [list(batch.lengths) for batch in measured.mixed] == plan.mixed
    assert measured.batches == plan.batches
    assert measured.seconds == pytest.approx(machine.now - 100.0)


def test_the_grid_has_powers_of_two_within_the_budget():
    assert sorted(grid_of(LARGE, 512)) == [
        (n, length)
        for n in (1, 2, 4, 8, 16, 32, 64)
        for length in (4, 8, 16, 32, 64, 128, 256, 512)
        if n * length <= 4096
    ]


def test_coarse_comes_before_fine_and_small_before_large():
    plan = MeasurementPlan.of(LARGE, 512)

    assert plan.needed == [(1, 4), (4, 4), (1, 512)]
    assert {*plan.needed, *plan.coarse} == {
        *((n, length) for length in (4, 16, 64) for n in (1, 4, 16, 64)),
        *((n, 256) for n in (1, 4, 16)),
        *((n, 512) for n in (1, 4, 8)),
    }
    for part in (plan.coarse, plan.fine):
        assert [n * length for n, length in part] == sorted(n * length for n, length in part)


def test_mixed_batches_run_between_coarse_and_fine():
    machine = Machine(fixed=0.05)

    machine.measure()

    ran = list(dict.fromkeys(machine.ran))
    ran.remove(REFERENCE)
    is_mixed = [len(set(batch)) > 1 for batch in ran]
    plan = MeasurementPlan.of(LARGE, 512)
    grid = len(plan.needed) + len(plan.coarse)
    # the reference is one of the fine ones
    fine = len(plan.fine) - 1
    assert is_mixed == [False] * grid + [True] * len(plan.mixed) + [False] * fine


@given(LIMITS, st.integers(1, 5000))
def test_no_plan_has_a_batch_twice_or_past_the_limits(limits, max_length):
    max_length = min(max_length, limits.max_tokens)
    plan = MeasurementPlan.of(limits, max_length)
    grid = grid_of(limits, max_length)

    assert len(grid) == len(set(grid))
    assert {(1, length) for _, length in grid} <= set(grid)
    for batch in [*([length] * n for n, length in grid), *plan.mixed]:
        assert limits.allow(len(batch), sum(batch), max(batch))
        assert max(batch) <= max_length


@given(LIMITS, st.integers(1, 5000), st.floats(0.01, 50.0), st.floats(1e-6, 1e-2))
@settings(max_examples=100, deadline=None)
def test_whatever_the_machine_the_bound_is_kept_and_there_is_a_table(
    limits, max_length, seconds, token
):
    max_length = min(max_length, limits.max_tokens)
    machine = Machine(fixed=10 * token, token=token, square=token / 500)
    needed = MeasurementPlan.of(limits, max_length).needed

    measured = machine.measure(limits, max_length, seconds)

    # the needed ones and the reference run twice at least, and the last batch may end late
    runs = [machine.cost(machine.ran[0]), *(machine.cost([length] * n) for n, length in needed)]
    slack = max(map(machine.cost, machine.ran))
    assert machine.now - 100.0 <= max(seconds, 2 * sum(runs)) + sum(runs) + slack
    table = measured.table(limits.execution)
    assert table.seconds(BatchShape.of([max_length])) > 0
    assert all(
        count * length <= limits.max_tokens for count, length in measured.samples if count > 2
    )
    assert all(
        limits.allow(len(batch), sum(batch), max(batch)) or len(batch) == 1 for batch in machine.ran
    )


@given(st.floats(0.05, 30.0))
@settings(max_examples=40, deadline=None)
def test_a_shorter_bound_measures_less_and_still_predicts_within_a_factor_of_two(seconds):
    machine = Machine()

    measured = machine.measure(seconds=seconds)

    table = measured.grid_table("packed")
    for lengths in MeasurementPlan.of(LARGE, 512).mixed:
        ratio = table.seconds(BatchShape.of(lengths)) / machine.cost(lengths)
        assert 0.5 < ratio < 2.0
    assert measured.is_complete == (measured.batches == machine.measure(seconds=1e9).batches)


def test_no_batch_runs_that_is_expected_to_end_after_the_bound():
    # a full batch takes 4 s: there is no time for four of them
    machine = Machine(token=1e-3, square=0.0)

    measured = machine.measure(seconds=5.0)

    assert max(map(machine.cost, machine.ran)) < 1.3
    assert machine.now - 100.0 <= 5.0
    assert not measured.is_complete
    assert len(measured.samples) > 8


def test_what_any_table_needs_is_measured_even_past_the_bound():
    machine = Machine(fixed=3.0)

    measured = machine.measure(seconds=1.0)

    # once each, as there is no time for repeats
    assert machine.ran == [REFERENCE, REFERENCE, (4,), (4,) * 4, (512,)]
    assert measured.samples.keys() == {(1, 4), (4, 4), (1, 512)}
    assert measured.mixed == ()
    assert not measured.is_complete


def test_lengths_whose_large_batches_had_no_time_are_left_out():
    everything = set(grid_of(LARGE, 512))
    machine = Machine()

    for seconds in (1.0, 2.0, 3.0, 4.0):
        samples = machine.measure(seconds=seconds).samples
        lengths = sorted({length for _, length in samples})
        most = [max(n for n, other in samples if other == length) for length in lengths]

        # the shortest is always there
        assert most[1:] == sorted(most[1:], reverse=True)
        assert samples.keys() < everything


def test_the_median_of_repeats_counts():
    machine = Machine(fixed=0.03, noise=(1.0, 1.0, 9.0, 1.0, 0.5))

    measured = machine.measure(BatchLimits(4, 64, "packed"), 16, seconds=1e6)

    for (count, length), seconds in measured.samples.items():
        assert seconds == pytest.approx(machine.cost([length] * count))


@pytest.mark.parametrize(
    ("fixed", "runs"),
    [(1e-4, 1 + 9), (0.03, 1 + 7), (0.06, 4), (0.11, 3), (0.3, 2), (0.6, 1)],
)
def test_shorter_batches_are_repeated_more_and_run_once_before(fixed, runs):
    machine = Machine(fixed=fixed, token=1e-6, square=0.0)

    machine.measure(BatchLimits(4, 64, "packed"), 16, seconds=1e6)

    assert machine.ran.count((16,)) == runs


def test_the_first_run_of_a_short_batch_does_not_count():
    machine = Machine()
    cost = machine.cost
    seen = set()

    def cost_at_first(lengths):
        known = tuple(lengths) in seen
        seen.add(tuple(lengths))
        return cost(lengths) + (0.0 if known else 1e-2)

    machine.cost = cost_at_first
    measured = machine.measure(BatchLimits(4, 64, "packed"), 16)

    assert measured.samples[1, 16] == pytest.approx(cost([16]))
    assert measured.spread == pytest.approx(1.0)


class DriftingMachine(Machine):
    """Its speed goes up and down, as where others use it too."""

    def run(self, lengths):
        # in steps as short as a slice of time
        left = self.cost(lengths)
        while left > 0:
            step = min(left, 5e-3)
            self.now += step * math.exp(0.35 * math.sin(2 * math.pi * self.now / 6.0))
            left -= step
        self.ran.append(tuple(lengths))


def test_a_machine_whose_speed_drifts_is_measured_as_if_it_did_not():
    machine = DriftingMachine()

    measured = machine.measure()

    ratios = [
        seconds / machine.cost([length] * count)
        for (count, length), seconds in measured.samples.items()
    ]
    middle = statistics.median(ratios)
    # the speed itself varies by a factor of two
    assert 0.7 < middle < 1.4
    assert statistics.median(abs(ratio / middle - 1) for ratio in ratios) < 0.03
    assert all(0.85 < ratio / middle < 1.15 for ratio in ratios)


def test_the_reference_takes_about_a_tenth_of_the_time():
    machine = Machine()

    measured = machine.measure(BatchLimits(64, 4096, "packed"), 512)

    spent = sum(machine.cost(batch) for batch in machine.ran if batch == REFERENCE)
    # the reference is a point of the grid as well
    spent -= 7 * machine.cost(REFERENCE)
    assert 0.05 < spent / measured.seconds < 0.12


def test_the_spread_says_how_unlike_repeats_were():
    assert Machine().measure().spread == pytest.approx(1.0)
    assert Machine(noise=(1.0, 1.1, 1.05)).measure().spread == pytest.approx(1.1)
    # a busy machine does not slow all batches down, but more than half of them
    assert Machine(noise=(*(1.0,) * 3, *(3.0,) * 2)).measure().spread == pytest.approx(3.0)


def test_progress_is_told_in_quarters():
    machine = Machine()

    measured = machine.measure(seconds=1e4)

    assert len(machine.said) == 3
    told = [re.fullmatch(r"measured (\d+) of (\d+) batches, ([\d.]+) s of at most 10000", line)
            for line in machine.said]  # fmt: skip
    assert {int(match[2]) for match in told} == {measured.batches}
    assert [int(match[1]) / measured.batches for match in told] == pytest.approx(
        [0.25, 0.5, 0.75], abs=0.02
    )


def test_progress_is_told_by_time_where_that_ends_first():
    machine = Machine(fixed=0.1)

    machine.measure(seconds=4.0)

    assert len(machine.said) == 3
    assert machine.said[0].endswith(" s of at most 4")


@pytest.mark.parametrize(
    "limits", [LARGE, BatchLimits(20, 10_240, "padded"), BatchLimits(16, 900, "packed")], ids=str
)
def test_mixed_batches_are_of_several_sizes_and_the_same_every_time(limits):
    mixed = MeasurementPlan.of(limits, 256).mixed

    assert mixed == MeasurementPlan.of(limits, 256).mixed
    assert len(mixed) >= 4
    assert max(map(sum, mixed)) > 4 * min(map(sum, mixed))
    assert all(len(set(batch)) > 1 for batch in mixed)


def test_one_sequence_a_batch_is_no_mixed_batch():
    assert MeasurementPlan.of(BatchLimits(1, 4096, "packed"), 512).mixed == []


def test_where_a_batch_holds_one_sequence_two_are_taken_to_cost_twice_as_much():
    measured = Machine().measure(BatchLimits(1, 4096, "packed"), 512)

    assert {count for count, _ in measured.samples} == {1, 2}
    assert measured.samples[2, 4] == 2 * measured.samples[1, 4]
    assert measured.table("packed").seconds(BatchShape.of([512])) == measured.samples[1, 512]


def test_mixed_batches_correct_the_grid():
    # batches of one length are 30 % cheaper than others, as where attention is called once for each length
    machine = Machine()
    affine = machine.cost
    machine.cost = lambda lengths: affine(lengths) * (0.7 if len(set(lengths)) == 1 else 1.0)

    measured = machine.measure()

    before = median_error(measured, measured.grid_table("packed"))
    assert 0.2 < before < 0.35
    assert median_error(measured, measured.table("packed")) < 0.4 * before


def test_mixed_batches_that_cost_what_the_grid_says_change_little():
    measured = Machine(square=0.0).measure()

    assert median_error(measured, measured.grid_table("packed")) < 1e-6
    assert measured.table("packed").grid == pytest.approx(measured.grid_table("packed").grid)


def test_errors_are_shares_of_what_a_batch_took():
    measured = Measurement(
        {(1, 4): 1.0, (2, 4): 2.0}, (MixedBatch((4, 4), 1.6), MixedBatch((4,), 2.0)), True, 1.0
    )

    assert measured.errors(measured.grid_table("packed")) == pytest.approx([0.25, -0.5])


def test_a_batch_for_which_there_is_no_memory_is_left_out():
    machine = Machine()
    run = machine.run

    def run_small(lengths):
        if sum(lengths) > 1024:
            raise MemoryError
        run(lengths)

    machine.run = run_small
    measured = machine.measure()

    assert {n * length for n, length in measured.samples} == {2**i for i in range(2, 11)}
    assert all(sum(batch.lengths) <= 1024 for batch in measured.mixed)
    assert not measured.is_complete


def test_no_memory_for_the_smallest_batches_is_an_error():
    machine = Machine()

    def run(lengths):
        raise MemoryError

    machine.run = run

    with pytest.raises(MemoryError):
        machine.measure()
