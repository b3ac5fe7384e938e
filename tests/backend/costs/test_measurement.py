"""Measuring costs on a virtual clock: time limits, early stop and drift in speed."""

import math
import re
import statistics

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from varlen.costs.model import BatchLimits, BatchShape, MeasuredBatch
from varlen.costs.store import Measurement, measure, plan_batches

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
    """Runs batches on a virtual clock."""

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
            report=self.said.append,
        )


def test_with_enough_time_all_planned_batches_are_measured():
    machine = Machine()

    measured = machine.measure()

    assert measured.is_complete
    assert [batch.lengths for batch in measured.batches] == plan_batches(LARGE, 512)
    for batch in measured.batches:
        assert batch.seconds == pytest.approx(machine.cost(batch.lengths))
    assert measured.seconds == pytest.approx(machine.now - 100.0)


def test_a_model_of_what_was_measured_predicts_any_batch():
    machine = Machine()

    model = machine.measure().model("packed")

    for lengths in ([1], [512], [3, 500, 77], [64] * 64, [8] * 33):
        assert model.seconds(BatchShape.of(lengths)) == pytest.approx(machine.cost(lengths))


def test_the_longest_sequence_is_measured_second_and_small_batches_before_large_ones():
    first, second, *others = plan_batches(LARGE, 512)

    assert sum(first) < 20
    assert second == (512,)
    assert list(map(sum, others)) == sorted(map(sum, others))
    assert sum(others[-1]) > 0.8 * 4096


@given(LIMITS, st.integers(1, 5000))
def test_no_plan_has_a_batch_twice_or_past_the_limits(limits, max_length):
    max_length = min(max_length, limits.max_tokens)

    batches = plan_batches(limits, max_length)

    assert batches == plan_batches(limits, max_length)
    assert len(batches) == len(set(batches)) <= 3 * 5
    assert (max_length,) in batches
    for lengths in batches:
        assert limits.allow(len(lengths), sum(lengths), max(lengths))
        assert max(lengths) <= max_length


@given(LIMITS, st.integers(1, 5000), st.floats(0.01, 50.0), st.floats(1e-6, 1e-2))
@settings(max_examples=100)
def test_whatever_the_machine_the_bound_is_kept_and_there_is_a_table(
    limits, max_length, seconds, token
):
    max_length = min(max_length, limits.max_tokens)
    machine = Machine(fixed=10 * token, token=token, square=token / 500)
    needed = plan_batches(limits, max_length)[:2]

    measured = machine.measure(limits, max_length, seconds)

    # the required batches and the reference run at least once, and the last batch may end late
    runs = [2 * machine.cost(machine.ran[0]), *map(machine.cost, needed)]
    slack = max(map(machine.cost, machine.ran))
    assert machine.now - 100.0 <= max(seconds, sum(runs)) + sum(runs) + slack
    model = measured.model(limits.execution)
    assert model.seconds(BatchShape.of([max_length])) > 0
    assert all(limits.allow(len(batch), sum(batch), max(batch)) for batch in machine.ran)


# so short that two or three batches are measured, which more than one set of numbers fits
@example(0.25)
@example(0.2656)
@given(st.floats(0.05, 30.0))
@settings(max_examples=40)
def test_a_shorter_bound_measures_less_and_still_predicts_within_a_factor_of_two(seconds):
    machine = Machine()

    measured = machine.measure(seconds=seconds)

    model = measured.model("packed")
    planned = plan_batches(LARGE, 512)
    for lengths in planned:
        assert 0.5 < model.seconds(BatchShape.of(lengths)) / machine.cost(lengths) < 2.0
    assert measured.is_complete == (len(measured.batches) == len(planned))


def test_no_batch_runs_that_is_expected_to_end_after_the_bound():
    # a full batch takes 4 s: there is no time for three of them
    machine = Machine(token=1e-3, square=0.0)

    measured = machine.measure(seconds=8.0)

    assert max(map(machine.cost, machine.ran)) < 2.7
    assert machine.now - 100.0 <= 8.0
    assert not measured.is_complete
    assert len(measured.batches) > 6


def test_the_shortest_and_the_longest_sequence_are_measured_even_past_the_bound():
    machine = Machine(fixed=3.0)

    measured = machine.measure(seconds=1.0)

    # once each, as there is no time for repeats
    assert machine.ran == [REFERENCE, (8,), (512,)]
    assert [batch.lengths for batch in measured.batches] == [(8,), (512,)]
    assert not measured.is_complete


def test_the_median_of_repeats_counts():
    machine = Machine(fixed=0.03, noise=(1.0, 1.0, 9.0, 1.0, 0.5))

    measured = machine.measure(BatchLimits(4, 64, "packed"), 16, seconds=1e6)

    for batch in measured.batches:
        assert batch.seconds == pytest.approx(machine.cost(batch.lengths))


@pytest.mark.parametrize(("fixed", "runs"), [(1e-3, 9), (0.03, 7), (0.06, 4), (0.11, 3), (5.0, 3)])
def test_a_batch_is_repeated_three_to_nine_times_for_a_fifth_of_a_second(fixed, runs):
    machine = Machine(fixed=fixed, token=1e-6, square=0.0)

    machine.measure(BatchLimits(4, 64, "packed"), 16, seconds=1e6)

    assert machine.ran.count((16,)) == runs


def test_a_first_run_that_is_slow_does_not_count():
    machine = Machine()
    cost = machine.cost
    seen = set()

    def cost_at_first(lengths):
        known = tuple(lengths) in seen
        seen.add(tuple(lengths))
        return cost(lengths) + (0.0 if known else 1e-2)

    machine.cost = cost_at_first
    measured = machine.measure(BatchLimits(4, 64, "packed"), 16)

    for batch in measured.batches:
        assert batch.seconds == pytest.approx(cost(batch.lengths))
    assert measured.spread == pytest.approx(1.0)


class DriftingMachine(Machine):
    """A machine whose speed changes, as under other load."""

    def run(self, lengths):
        # in steps no longer than a time slice
        left = self.cost(lengths)
        while left > 0:
            step = min(left, 5e-3)
            self.now += step * math.exp(0.35 * math.sin(2 * math.pi * self.now / 6.0))
            left -= step
        self.ran.append(tuple(lengths))


def test_a_machine_whose_speed_drifts_is_measured_as_if_it_did_not():
    machine = DriftingMachine()

    measured = machine.measure()

    ratios = [batch.seconds / machine.cost(batch.lengths) for batch in measured.batches]
    middle = statistics.median(ratios)
    # the speed itself varies by a factor of two
    assert 0.7 < middle < 1.4
    assert statistics.median(abs(ratio / middle - 1) for ratio in ratios) < 0.03
    assert all(0.85 < ratio / middle < 1.15 for ratio in ratios)
    assert 1.3 < measured.spread < 2.1


def test_the_reference_takes_about_a_tenth_of_the_time():
    machine = Machine()

    measured = machine.measure(BatchLimits(64, 4096, "packed"), 512)

    spent = sum(machine.cost(batch) for batch in machine.ran if batch == REFERENCE)
    assert 0.05 < spent / measured.seconds < 0.12


def test_the_spread_says_how_much_slower_slow_moments_are():
    assert Machine().measure().spread == pytest.approx(1.0)
    # a busy machine slows a third of the runs down
    assert Machine(noise=(1.0, 1.0, 3.0)).measure().spread == pytest.approx(3.0)


def test_progress_is_reported_in_quarters():
    machine = Machine()

    measured = machine.measure(seconds=1e4)

    assert len(machine.said) == 3
    told = [re.fullmatch(r"measured (\d+) of (\d+) batches, ([\d.]+) s of at most 10000", line)
            for line in machine.said]  # fmt: skip
    assert {int(match[2]) for match in told} == {len(measured.batches)}
    assert [int(match[1]) / len(measured.batches) for match in told] == pytest.approx(
        [0.25, 0.5, 0.75], abs=0.1
    )


def test_progress_is_reported_by_time_if_time_ends_first():
    machine = Machine(fixed=0.1)

    machine.measure(seconds=4.0)

    assert len(machine.said) == 3
    assert machine.said[0].endswith(" s of at most 4")


def test_errors_are_relative_to_what_a_batch_took():
    measured = Measurement((MeasuredBatch((4, 4), 1.6), MeasuredBatch((4,), 2.0)), True, 1.0)
    model = Measurement((MeasuredBatch((4, 4), 2.0), MeasuredBatch((4,), 1.0)), True, 1.0).model(
        "packed"
    )

    assert measured.errors(model) == pytest.approx([0.25, -0.5])


def test_a_batch_for_which_there_is_no_memory_is_left_out():
    machine = Machine()
    run = machine.run

    def run_small(lengths):
        if sum(lengths) > 1024:
            raise MemoryError
        run(lengths)

    machine.run = run_small
    measured = machine.measure()

    planned = plan_batches(LARGE, 512)
    assert [batch.lengths for batch in measured.batches] == [b for b in planned if sum(b) <= 1024]
    assert not measured.is_complete


def test_no_memory_for_the_smallest_batches_is_an_error():
    machine = Machine()

    def run(lengths):
        raise MemoryError

    machine.run = run

    with pytest.raises(MemoryError):
        machine.measure()
