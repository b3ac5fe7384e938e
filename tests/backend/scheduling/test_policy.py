"""Scheduling policies: best sizes by brute force, limits, deadlines, no lost sequences."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.scheduling.policy import CutByCost, FullBatches
from varlen.scheduling.queue import RequestQueue

from .waiting import cost_table, lengths_of, state_of

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
# of one CPU core
CORE = cost_table(lambda n, length: 6e-3 + 160e-6 * n + 360e-6 * n * length)
# nothing refines them
COSTS = {execution: cost_table(execution=execution) for execution in ("packed", "padded")}
EXECUTIONS = st.sampled_from(sorted(COSTS))
ROOMY = BatchLimits(64, 4096)


def queue_of(lengths, served=0):
    """Return a queue whose order is that of these lengths; other requests have been served."""
    queue = RequestQueue()
    for _ in range(served):
        queue.add(state_of(1))
        queue.remove(queue.first(1))
    for length in lengths:
        queue.add(state_of(length))
    return queue


def full_batches(max_sequences, max_tokens, execution="packed"):
    limits = BatchLimits(max_sequences, max_tokens, execution)
    return FullBatches(limits, COSTS[execution])


def cut_by_cost(costs=CORE, limits=ROOMY, workers=1):
    return CutByCost(limits, costs, workers)


def size_of(lengths, **policy):
    """Return the size of the first batch of a queue."""
    return len(cut_by_cost(**policy).choose(queue_of(lengths), 0.0, 1.0).sequences)


def drain(policy, queue, now=0.0):
    batches = []
    while len(queue):
        batch = policy.choose(queue, now, 1.0)
        queue.remove(batch.sequences)
        batches.append(batch)
    return batches


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(60, 200), EXECUTIONS)
def test_full_batches_are_filled_one_after_the_other(lengths, max_sequences, max_tokens, execution):
    policy = full_batches(max_sequences, max_tokens, execution)

    batches = [lengths_of(batch) for batch in drain(policy, queue_of(lengths))]

    assert [length for batch in batches for length in batch] == lengths
    limits = BatchLimits(max_sequences, max_tokens, execution)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert limits.allow(len(batch), sum(batch), max(batch))
        if following:
            more = [*batch, following[0]]
            assert not limits.allow(len(more), sum(more), max(more))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(60, 200), EXECUTIONS, st.integers(1, 4))
def test_batches_cut_by_cost_keep_the_order_and_the_limits(
    lengths, max_sequences, max_tokens, execution, workers
):
    costs = COSTS[execution]
    limits = BatchLimits(max_sequences, max_tokens, execution)

    batches = drain(cut_by_cost(costs, limits, workers), queue_of(lengths))

    assert [length for batch in batches for length in lengths_of(batch)] == lengths
    for batch in batches:
        assert batch.shape == BatchShape.of(lengths_of(batch))
        assert batch.seconds == pytest.approx(costs.seconds(batch.shape))
        assert limits.allow(batch.shape.sequences, batch.shape.tokens, batch.shape.longest)


@settings(deadline=None)
@given(LENGTHS, EXECUTIONS, st.integers(1, 4), st.integers(0, 400))
def test_no_other_size_has_a_lower_delay(lengths, execution, workers, came):
    """A batch delays requests that wait or come, and all by its seconds per token."""
    costs = COSTS[execution]
    limits = BatchLimits(8, 200, execution)

    queue = queue_of(lengths, served=came)

    size = len(cut_by_cost(costs, limits, workers).choose(queue, 0.0, 1.0).sequences)

    def seconds(size):
        return costs.seconds(BatchShape.of(lengths[:size]))

    def joins(number):
        added = seconds(number) - seconds(number - 1)
        saved = costs.fixed_seconds * len(lengths) * 8 / workers
        return (number - 1) * added <= saved * (1 + 1e-9)

    allowed = [1]
    for n in range(2, len(lengths) + 1):
        if not limits.allow(n, sum(lengths[:n]), max(lengths[:n])) or not joins(n):
            break
        allowed.append(n)
    coming = 1 + came / len(lengths)  # within the time that it takes to drain the queue
    in_front = max(1, coming / 2)

    def delay(size):
        return seconds(size) * (in_front + 8 * sum(lengths) / (sum(lengths[:size]) * workers))

    assert delay(size) == pytest.approx(min(map(delay, allowed)))


def test_choosing_takes_nothing_out_of_the_queue():
    queue = queue_of([3, 400, 5])

    cut_by_cost().choose(queue, 0.0, 1.0)

    assert [each.num_tokens for each in queue] == [3, 400, 5]
    assert queue.waiting_tokens == 408


def test_a_longer_queue_has_larger_batches():
    sizes = [size_of([60] * waiting) for waiting in (1, 2, 4, 8, 32, 512)]

    assert sizes == sorted(sizes)
    assert sizes[:2] == [1, 2]
    assert sizes[-2] < sizes[-1] < 64


def test_more_workers_share_the_queue():
    sizes = [size_of([60] * 32, workers=workers) for workers in (1, 2, 8, 32)]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_a_short_request_does_not_wait_for_a_long_one():
    """If many requests wait, a batch of its own would delay them more."""
    assert size_of([20, 500]) == 1
    assert size_of([20, *[500] * 20]) > 1
    # eight workers would finish the others soon
    assert size_of([20, *[500] * 20], workers=8) == 1


def test_rows_of_a_large_request_run_in_small_batches_while_others_come():
    def size(others):
        queue = RequestQueue()
        for _ in range(others):
            queue.add(state_of(20))
            queue.remove(queue.first(1))
        queue.add(state_of(*[250] * 64))
        return len(cut_by_cost(workers=2).choose(queue, 1.0, 1.0).sequences)

    assert [size(others) for others in (0, 4, 100)] == [4, 3, 1]


def test_arrivals_count_for_as_long_as_the_queue_drains_on_a_machine_that_is_slow_now():
    queue = RequestQueue()
    for _ in range(100):
        queue.add(state_of(20))
        queue.remove(queue.first(1))
    queue.add(state_of(*[250] * 64))

    sizes = [
        len(cut_by_cost(workers=2).choose(queue, 10.0, slowdown).sequences) for slowdown in (1, 5)
    ]

    assert sizes == [4, 1]


def test_a_batch_below_the_floor_is_filled():
    """A GPU takes as long for 256 tokens as for one."""
    costs = cost_table(lambda n, length: 2e-3 + 4e-6 * max(256, n * length))

    assert size_of([30, 30, 30, 30], costs=costs) == 4
    assert size_of([30] * 8, costs=costs, workers=8) == 8


def test_a_long_sequence_does_not_join_short_ones_that_pad_it():
    costs = cost_table(lambda n, length: 6e-3 + 360e-6 * n * length, "padded")

    assert size_of([5, 6, 7, 500], costs=costs, limits=BatchLimits(64, 4096, "padded")) == 3


def test_a_batch_ends_before_the_deadlines_of_its_requests():
    queue = RequestQueue()
    in_time = CORE.seconds(BatchShape.of([60] * 3)) + 1e-6
    queue.add(state_of(60, deadline=10.0 + in_time))
    for _ in range(100):
        queue.add(state_of(60))

    batch = cut_by_cost().choose(queue, 10.0, 1.0)

    assert len(batch.sequences) == 3
    assert batch.reason.startswith("cut by cost, for a deadline")


def test_a_deadline_that_is_missed_anyway_does_not_make_batches_small():
    queue = RequestQueue()
    queue.add(state_of(60, deadline=1e-3))
    for _ in range(100):
        queue.add(state_of(60))

    assert len(cut_by_cost().choose(queue, 0.0, 1.0).sequences) > 10


def test_a_sequence_beyond_the_token_limit_runs_alone():
    # a limit below the longest sequence may come from a small arena
    batch = cut_by_cost(limits=BatchLimits(64, 100)).choose(queue_of([500, 1]), math.inf, 1.0)

    assert lengths_of(batch) == [500]
