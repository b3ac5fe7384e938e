"""Scheduling policies: batch limits, no lost sequences, and bounded waiting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.scheduling.load import LoadMeter
from varlen.scheduling.policy import InOrder, LeastCost
from varlen.scheduling.queue import RequestQueue

from .waiting import cost_table, lengths_of, state_of

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
EXECUTIONS = st.sampled_from(["packed", "padded"])


def queue_of(lengths):
    queue = RequestQueue()
    for number, length in enumerate(lengths):
        queue.add(state_of(length, arrival=number * 1e-3))
    return queue


def in_order(max_sequences, max_tokens, execution="packed"):
    limits = BatchLimits(max_sequences, max_tokens, execution)
    return InOrder(limits, cost_table(execution=execution))


def least_cost(costs=None, max_sequences=64, max_tokens=4096, max_wait=1.0):
    costs = costs or cost_table()
    limits = BatchLimits(max_sequences, max_tokens, costs.execution)
    return LeastCost(limits, costs, LoadMeter(), lambda: 0.0, max_wait)


def drain(policy, queue, now=0.0):
    batches = []
    while len(queue):
        batch = policy.choose(queue, now)
        queue.remove(batch.sequences)
        batches.append(batch)
    return batches


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(60, 200), EXECUTIONS)
def test_in_order_fills_batches_one_after_the_other(lengths, max_sequences, max_tokens, execution):
    policy = in_order(max_sequences, max_tokens, execution)

    batches = [lengths_of(batch) for batch in drain(policy, queue_of(lengths))]

    assert [length for batch in batches for length in batch] == lengths
    limits = BatchLimits(max_sequences, max_tokens, execution)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert limits.allow(len(batch), sum(batch), max(batch))
        if following:
            more = [*batch, following[0]]
            assert not limits.allow(len(more), sum(more), max(more))


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 8), st.integers(60, 200), EXECUTIONS, st.floats(0, 2))
def test_least_cost_keeps_the_limits_and_loses_nothing(
    lengths, max_sequences, max_tokens, execution, now
):
    costs = cost_table(execution=execution)
    policy = least_cost(costs, max_sequences, max_tokens)
    queue = queue_of(lengths)
    held = list(queue)

    batches = drain(policy, queue, now)

    ran = [each for batch in batches for each in batch.sequences]
    assert sorted(map(id, ran)) == sorted(map(id, held))
    limits = BatchLimits(max_sequences, max_tokens, execution)
    for batch in batches:
        assert batch.shape == BatchShape.of(lengths_of(batch))
        assert batch.seconds == pytest.approx(costs.seconds(batch.shape))
        assert limits.allow(batch.shape.sequences, batch.shape.tokens, batch.shape.longest)


def test_choosing_takes_nothing_out_of_the_queue():
    queue = queue_of([3, 400, 5])

    least_cost().choose(queue, 0.0)

    assert [each.num_tokens for each in queue] == [3, 400, 5]


def test_short_sequences_go_first_while_the_long_one_is_young():
    batch = least_cost().choose(queue_of([512, 4, 4, 4]), 0.0)

    assert lengths_of(batch) == [4, 4, 4]
    assert batch.reason.startswith("by length, 4 requests waiting")


def test_a_sequence_that_has_waited_as_long_as_serving_all_in_order_takes_is_not_passed_over():
    costs = cost_table()
    backlog = costs.seconds(BatchShape.of([512, 4, 4, 4]))

    batch = least_cost(costs).choose(queue_of([512, 4, 4, 4]), backlog)

    assert 512 in lengths_of(batch)


def test_a_sequence_that_has_waited_longer_than_max_wait_is_not_passed_over():
    policy = least_cost(max_wait=0.05)

    batch = policy.choose(queue_of([512, 4, 4, 4]), 0.06)

    assert 512 in lengths_of(batch)


def test_padded_batches_hold_sequences_of_like_length():
    costs = cost_table(lambda n, length: 2.0 + 1e-3 * n * length, "padded")
    policy = least_cost(costs, max_wait=100.0)

    batches = drain(policy, queue_of([500, 5, 495, 6, 490, 7]))

    assert sorted(sorted(lengths_of(batch)) for batch in batches) == [[5, 6, 7], [490, 495, 500]]


def test_packed_batches_in_order_where_nothing_is_gained_by_another():
    # batches of any size cost nearly the same
    policy = least_cost(cost_table(lambda n, length: 1.0 + 1e-6 * n * length))

    batch = policy.choose(queue_of([500, 5, 490, 6]), 0.0)

    assert lengths_of(batch) == [500, 5, 490, 6]
    assert batch.reason.startswith("in order")


def test_a_deadline_that_could_be_kept_is_kept():
    # in order of length, the long one would run last and miss its deadline
    policy = least_cost()
    alone = cost_table().seconds(BatchShape.of([512]))
    queue = queue_of([100] * 30)
    queue.add(state_of(512, deadline=alone + 0.001), latest_start=0.0)
    queue.promote(0.0)

    assert lengths_of(policy.choose(queue, 0.0)) == [512]


def test_only_the_first_of_a_long_queue_are_planned():
    policy = least_cost(max_sequences=4)
    queue = queue_of([60] * 300 + [1] * 300)

    assert set(lengths_of(policy.choose(queue, 0.0))) == {60}


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(0, 0.2)), min_size=1, max_size=40),
    st.floats(0.01, 0.3),
)
def test_no_sequence_is_passed_over_for_longer_than_allowed(arrivals, max_wait):
    """After `max_wait`, the queue's first sequence runs in the next batch."""
    policy = least_cost(max_wait=max_wait)
    queue, now = RequestQueue(), 0.0
    coming = []
    at = 0.0
    for length, gap in arrivals:
        at += gap
        coming.append(state_of(length, arrival=at))
    while coming or len(queue):
        while coming and coming[0].arrival <= now:
            queue.add(coming.pop(0))
        if not len(queue):
            now = coming[0].arrival
            continue
        (first,) = queue.first(1)
        batch = policy.choose(queue, now)
        if now - first.request.arrival >= max_wait:
            assert first in batch.sequences
        queue.remove(batch.sequences)
        now += batch.seconds
