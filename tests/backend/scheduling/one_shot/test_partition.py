"""The DP partition: exact by brute force; deadlines, rows, workers and arrivals."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.scheduling.one_shot.waiting import cost_table, lengths_of, state_of
from varlen.costs.model import BatchLimits, BatchShape
from varlen.scheduling.one_shot.partition import DpPartition, best_partition
from varlen.scheduling.one_shot.queue import RequestQueue

# of one CPU core
CORE = cost_table(lambda n, length: 6e-3 + 160e-6 * n + 360e-6 * n * length)
ROOMY = BatchLimits(64, 4096)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
# rows of each request, each row with its length
REQUESTS = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), min_size=1, max_size=10)
EXECUTIONS = st.sampled_from(["packed", "padded"])
# seconds of a batch: fixed, by sequence, by token, by squared length, floor
COSTS = st.tuples(*[st.sampled_from([0.0, 1e-5, 1e-4, 1e-3])] * 4, st.sampled_from([0.0, 5e-3]))
LATER = 1e6


def queue_of(*requests, came=0, now=LATER):
    """Return a queue of these requests; `came` others have been served lately."""
    queue = RequestQueue("sequences")
    for _ in range(came):
        queue.add(state_of(1, arrival=now))
        queue.remove(queue.first(1))
    for request in requests:
        queue.add(state_of(*request) if isinstance(request, list) else state_of(request))
    return queue


def dp(costs=CORE, limits=ROOMY, workers=1, pressure=9.0):
    return DpPartition(limits, costs, workers, pressure)


def choose(policy, queue, now, slowdown):
    """Return what a policy chooses at some time."""
    queue.now = now
    return policy.choose(queue, slowdown)


def size_of(*requests, came=0, **policy):
    """Return the size of the batch that runs first."""
    queue = queue_of(*requests, came=came)
    return len(choose(dp(**policy), queue, LATER, 1.0).sequences)


def random_costs(numbers, execution):
    fixed, by_sequence, by_token, by_square, floor = numbers
    return cost_table(
        lambda n, length: (
            1e-6 + max(floor, fixed + n * (by_sequence + length * (by_token + by_square * length)))
        ),
        execution,
    )


def partitions(count):
    """Yield every division of a list into consecutive parts, as ranges."""
    for size in range(count):
        for cuts in combinations(range(1, count), size):
            yield [range(*ends) for ends in pairwise((0, *cuts, count))]


def expected_delay(parts, rows, costs, limits, *, workers, pressure, coming):
    """Return the delay of a partition by the formula of `DpPartition`; infinity beyond the limits.

    Args:
        rows: request and length of each sequence, in order.
        coming: number of requests that come while the queue drains.
    """
    lengths = [length for _, length in rows]
    of_request = {request: [r for r, _ in rows].count(request) for request, _ in rows}
    waiting, delay = len(of_request), 0.0
    for part in parts:
        shape = BatchShape.of([lengths[i] for i in part])
        if len(part) > 1 and not limits.allow(shape.sequences, shape.tokens, shape.longest):
            return math.inf
        seconds = costs.seconds(shape)
        own = sum(1 / of_request[rows[i][0]] for i in part)
        unfinished = len({request for request, _ in rows[part.stop :]})
        if part.stop == len(rows):
            left = sum(1 / of_request[request] for request, _ in rows[part.start :])
            joining = coming * sum(lengths[: part.start]) / sum(lengths)
            tokens = limits.computed_tokens(shape.sequences, shape.tokens, shape.longest)
            full = max(shape.sequences / limits.max_sequences, tokens / limits.max_tokens)
            shared = max(0.0, 1 - full) * joining / (joining + left)
            paid = seconds - costs.fixed_seconds * shared
        else:
            paid = seconds
        delay += paid * (own + (unfinished + pressure * waiting) / workers)
    return delay


@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_the_partition_is_the_best_of_all(data, count, sizes):
    cost = st.sampled_from([0.0, 1.0, 2.5, 7.0, math.inf])
    costs = np.array([[data.draw(cost) for _ in range(sizes)] for _ in range(count)])
    costs[:, 0] = np.minimum(costs[:, 0], 9.0)

    def total(parts):
        if max(map(len, parts)) > sizes:
            return math.inf
        return sum(costs[part.start, len(part) - 1] for part in parts)

    best = best_partition(costs)

    assert [i for part in best for i in part] == list(range(count))
    least = min(map(total, partitions(count)))
    assert total(best) == pytest.approx(least)
    # equally good ones begin with smaller batches
    equal = [parts for parts in partitions(count) if total(parts) == pytest.approx(least, rel=1e-9)]
    assert len(best[0]) == max(len(parts[0]) for parts in equal)


@settings(max_examples=50)
@given(
    REQUESTS.filter(lambda requests: sum(map(len, requests)) <= 10),
    COSTS,
    EXECUTIONS,
    st.integers(1, 5),
    st.sampled_from([0.0, 1.0, 9.0, 40.0]),
    st.tuples(st.integers(1, 6), st.integers(60, 300)),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 3.0]),
)
def test_no_partition_has_less_delay(
    requests, numbers, execution, workers, pressure, most, is_busy, slowdown
):
    """Checked by the formula, over all partitions of up to ten sequences."""
    costs, limits = random_costs(numbers, execution), BatchLimits(*most, execution)
    # as many have come as wait, and those that wait: more would add the delay of arrivals during a batch
    queue = queue_of(*requests, came=len(requests) if is_busy else 0)
    coming = 2 * len(requests) if is_busy else 0
    rows = [(sequence.request, sequence.num_tokens) for sequence in queue]

    # a machine that is slow now changes no decision
    batch = choose(dp(costs, limits, workers, pressure), queue, LATER, slowdown)

    delays = {
        tuple(map(len, parts)): expected_delay(
            parts, rows, costs, limits, workers=workers, pressure=pressure, coming=coming
        )
        for parts in partitions(len(rows))
    }
    with_this_first = min(
        delay for sizes, delay in delays.items() if sizes[0] == len(batch.sequences)
    )
    assert with_this_first == pytest.approx(min(delays.values()), rel=1e-9)


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=10),
    COSTS,
    EXECUTIONS,
    st.tuples(st.integers(1, 6), st.integers(60, 300)),
)
def test_with_infinite_pressure_no_partition_by_length_takes_less_time(
    lengths, numbers, execution, most
):
    """The objective of TurboTransformers; its batches are consecutive in the order of length."""
    costs, limits = random_costs(numbers, execution), BatchLimits(*most, execution)
    queue = queue_of(*lengths)

    batch = choose(dp(costs, limits, pressure=math.inf), queue, LATER, 1.0)

    ordered = sorted(lengths)

    def seconds(parts):
        shapes = [BatchShape.of([ordered[i] for i in part]) for part in parts]
        fits = (limits.allow(s.sequences, s.tokens, s.longest) or s.sequences == 1 for s in shapes)
        return sum(map(costs.seconds, shapes)) if all(fits) else math.inf

    found = sorted(lengths_of(batch))
    with_this = min(
        seconds(parts)
        for parts in partitions(len(ordered))
        if any([ordered[i] for i in part] == found for part in parts)
    )
    assert with_this == pytest.approx(min(map(seconds, partitions(len(ordered)))), rel=1e-9)
    # so that no request starves
    assert queue.first(1)[0] in batch.sequences


@given(LENGTHS, st.integers(1, 8), st.integers(60, 200), EXECUTIONS, st.integers(1, 4))
def test_batches_keep_the_order_and_the_limits(
    lengths, max_sequences, max_tokens, execution, workers
):
    costs, limits = (
        cost_table(execution=execution),
        BatchLimits(max_sequences, max_tokens, execution),
    )
    policy, queue = dp(costs, limits, workers), queue_of(*lengths)

    batches = []
    while len(queue):
        batches.append(choose(policy, queue, LATER, 1.0))
        queue.remove(batches[-1].sequences)

    assert [length for batch in batches for length in lengths_of(batch)] == lengths
    for batch in batches:
        assert batch.shape == BatchShape.of(lengths_of(batch))
        assert batch.seconds == pytest.approx(costs.seconds(batch.shape))
        assert len(batch.sequences) == 1 or limits.allow(
            batch.shape.sequences, batch.shape.tokens, batch.shape.longest
        )


@pytest.mark.parametrize("pressure", [9.0, math.inf])
def test_choosing_takes_nothing_out_of_the_queue(pressure):
    queue = queue_of(3, 400, 5)

    choose(dp(pressure=pressure), queue, LATER, 1.0)

    assert [each.num_tokens for each in queue] == [3, 400, 5]
    assert queue.waiting_tokens == 408


def test_a_longer_queue_has_larger_batches():
    sizes = [size_of(*[60] * waiting) for waiting in (1, 2, 4, 8, 32, 512)]

    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert sizes[-2] < sizes[-1]


def test_more_workers_share_the_queue():
    sizes = [size_of(*[60] * 32, workers=workers) for workers in (1, 2, 8, 32)]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_a_short_request_does_not_wait_for_a_long_one():
    """If many requests wait, a batch of its own would delay them more."""
    assert size_of(20, 500) == 1
    assert size_of(20, *[500] * 20) > 1
    # eight workers would finish the others soon
    assert size_of(20, *[500] * 20, workers=8) == 1


def test_rows_of_a_large_request_are_spread_over_the_workers():
    sizes = [size_of([50] * 32, workers=workers) for workers in (1, 4, 16)]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] <= 8


def test_rows_of_a_large_request_run_in_small_batches_while_others_come():
    sizes = [size_of([250] * 64, came=came, workers=2) for came in (0, 4, 100)]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1 < sizes[0]


def test_requests_that_come_make_it_cheaper_to_leave_some_behind():
    """They share the fixed seconds of the last batch."""
    waiting = [10, 10, 10, 40]

    assert size_of(*waiting, pressure=6.0) == 4
    assert size_of(*waiting, pressure=6.0, came=8) == 3


def test_arrivals_count_for_as_long_as_the_queue_drains_on_a_machine_that_is_slow_now():
    def size(slowdown):
        queue = RequestQueue()
        for _ in range(100):
            queue.add(state_of(20))
            queue.remove(queue.first(1))
        queue.add(state_of(*[250] * 64))
        return len(choose(dp(workers=2), queue, 10.0, slowdown).sequences)

    assert size(1) > size(5) == 1


def test_a_batch_below_the_floor_is_filled():
    """A GPU takes as long for 256 tokens as for one."""
    costs = cost_table(lambda n, length: 2e-3 + 4e-6 * max(256, n * length))

    assert size_of(30, 30, 30, 30, costs=costs) == 4
    assert size_of(*[30] * 8, costs=costs, workers=8) == 8


def test_a_long_sequence_does_not_join_short_ones_that_pad_it():
    costs = cost_table(lambda n, length: 6e-3 + 360e-6 * n * length, "padded")

    assert size_of(5, 6, 7, 500, costs=costs, limits=BatchLimits(64, 4096, "padded")) == 3


@pytest.mark.parametrize("most", [64, 1000])
def test_a_batch_ends_before_the_deadlines_of_its_requests(most):
    queue = RequestQueue()
    in_time = CORE.seconds(BatchShape.of([60] * 3)) + 1e-6
    queue.add(state_of(60, deadline=10.0 + in_time))
    for _ in range(2000):
        queue.add(state_of(60))

    batch = choose(dp(limits=BatchLimits(most, 64 * most)), queue, 10.0, 1.0)

    assert len(batch.sequences) <= 3
    assert batch.reason.endswith(", ended before a deadline")


def test_a_deadline_that_is_missed_anyway_does_not_make_batches_small():
    queue = RequestQueue()
    queue.add(state_of(60, deadline=1e-3))
    for _ in range(100):
        queue.add(state_of(60))

    assert len(choose(dp(), queue, 0.0, 1.0).sequences) > 10


def test_an_urgent_request_keeps_its_place_although_others_are_shorter():
    queue = RequestQueue("tokens")
    for length in (5, 6, 7):
        queue.add(state_of(length))
    queue.add(state_of(90, deadline=1.0), 0.5)
    queue.promote(0.6)

    assert lengths_of(choose(dp(pressure=math.inf), queue, 0.6, 1.0))[0] == 90


def test_a_sequence_beyond_the_token_limit_runs_alone():
    # a limit below the longest sequence may come from a small arena
    batch = choose(dp(limits=BatchLimits(64, 100)), queue_of(500, 1), LATER, 1.0)

    assert lengths_of(batch) == [500]


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.sampled_from([9.0, math.inf]), EXECUTIONS)
def test_batches_of_a_long_queue_are_within_the_limits(numbers, pressure, execution):
    """Found in review: units of several sequences passed the limit."""
    limits = BatchLimits(256, 1024, execution)
    costs = cost_table(execution=execution)
    lengths = [numbers.choice([1, 2, 400, 512]) for _ in range(350)]
    queue = queue_of(*lengths)

    batch = choose(dp(costs, limits, pressure=pressure), queue, LATER, 1.0)

    shape = batch.shape
    assert shape.sequences == 1 or limits.allow(shape.sequences, shape.tokens, shape.longest)


@pytest.mark.parametrize("pressure", [9.0, math.inf])
@pytest.mark.parametrize("most", [64, 1000])
def test_a_long_queue_is_decided_by_its_front(most, pressure):
    """A decision looks at few sequences, and its batch is within the limits."""
    limits = BatchLimits(most, 4096)
    floor = cost_table(lambda n, length: 5e-3 + 1e-7 * n * length, max_sequences=most)
    queue = queue_of(*[1 + i % 7 for i in range(5000)])

    batch = choose(dp(floor, limits, pressure=pressure), queue, LATER, 1.0)

    assert limits.allow(batch.shape.sequences, batch.shape.tokens, batch.shape.longest)
    # units of several sequences leave the batch large
    assert len(batch.sequences) >= 60
