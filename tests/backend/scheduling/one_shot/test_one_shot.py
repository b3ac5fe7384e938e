"""One-shot scheduling: when batches start, forecasts, and learned costs."""

import math
import random
from itertools import chain
from typing import get_args

import pytest

from tests.backend.scheduling.one_shot.waiting import (
    add,
    cost_table,
    lengths_of,
    make_scheduler,
    request_of,
    run,
)
from varlen.config import PolicyName
from varlen.costs.model import BatchShape
from varlen.errors import DeadlineError
from varlen.scheduling.batch import BatchResult


def test_nothing_waits_so_nothing_starts():
    assert make_scheduler().wake_at(5.0) is None


def test_hungry_starts_at_once():
    scheduler = make_scheduler(trigger="hungry", max_delay_ms=1000)
    add(scheduler, 5, now=1.0)

    assert scheduler.wake_at(1.5) == 1.5


def test_lazy_waits_for_the_delay_of_the_oldest():
    scheduler = make_scheduler(trigger="lazy", max_delay_ms=100)
    add(scheduler, 5, now=1.0)
    add(scheduler, 5, now=1.05)

    assert scheduler.wake_at(1.06) == pytest.approx(1.1)
    assert scheduler.wake_at(1.2) == 1.2


@pytest.mark.parametrize(
    "limit, before, last",
    [({"max_batch_sequences": 3}, [5, 5], 5), ({"max_batch_tokens": 600}, [300], 300)],
    ids=["sequences", "tokens"],
)
def test_lazy_starts_a_batch_that_is_full(limit, before, last):
    scheduler = make_scheduler(trigger="lazy", max_delay_ms=100, **limit)
    add(scheduler, *before)
    assert scheduler.wake_at(0.0) == pytest.approx(0.1)

    add(scheduler, last)

    assert scheduler.wake_at(0.0) == 0.0


def test_lazy_does_not_wait_so_long_that_a_deadline_is_missed():
    scheduler = make_scheduler(trigger="lazy", max_delay_ms=1000)
    add(scheduler, 100, deadline=0.8)

    start = scheduler.wake_at(0.0)

    assert 0.0 < start <= 0.8 - cost_table().seconds(BatchShape.of([100]))


@pytest.mark.parametrize(
    "policy, batches",
    [
        ("none", [[100]] * 10),
        ("fifo", [[100] * 4, [100] * 4, [100] * 2]),
        ("token_budget", [[100] * 5, [100] * 5]),
    ],
)
def test_policies_in_order_fill_a_batch_by_one_limit(policy, batches):
    scheduler = make_scheduler(policy=policy, max_batch_sequences=4, max_batch_tokens=512)
    add(scheduler, *[100] * 10)

    found = []
    while scheduler.wake_at(0.0) is not None:
        found.append(lengths_of(scheduler.schedule(0.0)))

    assert found == batches


def test_no_batch_passes_the_token_bound_whatever_the_policy():
    for policy in ("fifo", "dp"):
        scheduler = make_scheduler(policy=policy, max_batch_tokens=512)
        add(scheduler, *[100] * 10)
        while scheduler.wake_at(0.0) is not None:
            assert scheduler.schedule(0.0).shape.tokens <= 512


@pytest.mark.parametrize("execution", ["packed", "padded"])
@pytest.mark.parametrize("trigger", ["hungry", "lazy"])
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_sequence_that_is_longer_than_a_batch_runs_by_itself(policy, trigger, execution):
    scheduler = make_scheduler(
        policy=policy, trigger=trigger, execution=execution, max_batch_tokens=512
    )
    lengths = [100, 2000, 100, 513, 100, 100]
    request = add(scheduler, *lengths)
    assert 0 < request.forecast.seconds < math.inf

    found = []
    while (at := scheduler.wake_at(0.0)) is not None:
        found.append(lengths_of(scheduler.schedule(at)))

    assert [2000] in found
    assert [513] in found
    assert sorted(chain.from_iterable(found)) == sorted(lengths)
    assert all(len(batch) == 1 or sum(batch) <= 512 for batch in found)


def test_the_rows_of_one_request_run_together_if_no_other_request_waits():
    scheduler = make_scheduler(policy="dp")
    add(scheduler, 4, 500, 7, 8, 300)

    assert sorted(lengths_of(scheduler.schedule(0.0))) == [4, 7, 8, 300, 500]


def test_priority_goes_ahead_of_requests_that_came_a_little_before():
    scheduler = make_scheduler(policy="none")
    for length in (1, 2, 3, 4):
        add(scheduler, length)
    add(scheduler, 5, priority=1)

    order = [lengths_of(scheduler.schedule(0.6))[0] for _ in range(5)]

    # the priority counts as a queue of two requests, not four
    assert order == [1, 2, 3, 5, 4]


def test_deadlines_are_served_first_in_time_by_every_policy():
    for policy in get_args(PolicyName):
        scheduler = make_scheduler(policy=policy, max_batch_tokens=512)
        add(scheduler, *[300] * 5)
        add(scheduler, 301, deadline=0.1)

        assert 301 in lengths_of(scheduler.schedule(0.07)), policy


def test_a_forecast_is_the_share_of_full_batches():
    costs = cost_table(lambda n, length: 1.0 + n * length)
    scheduler = make_scheduler(costs, max_batch_sequences=4, max_batch_tokens=512)

    forecast = scheduler.admit(request_of(100, 200), 0.0)

    # four of 100 tokens fit by number, two of 200 by tokens
    assert forecast.seconds == pytest.approx((1 + 400) / 4 + (1 + 400) / 2)
    assert forecast.batch_seconds == pytest.approx(401)


def test_the_forecast_follows_what_batches_take():
    scheduler = make_scheduler(policy="token_budget", max_batch_tokens=512)
    before = forecast(scheduler, 128)

    for _ in range(640):
        add(scheduler, *[128] * 4)
        run(scheduler, scheduler.schedule(0.0), 2 * before * 4)

    assert forecast(scheduler, 128) == pytest.approx(2 * before, rel=0.02)


def test_forecasts_of_all_batches_follow_a_machine_that_is_busy_elsewhere():
    scheduler = make_scheduler(policy="token_budget", max_batch_tokens=512)
    before = forecast(scheduler, 8)

    numbers = random.Random(0)
    for _ in range(100):
        add(scheduler, *numbers.choices(range(40, 129), k=4))
        batch = scheduler.schedule(0.0)
        run(scheduler, batch, 2 * cost_table().seconds(batch.shape))

    # lengths that did not run are slower too, but some of the change applies only to those that ran
    assert 1.6 * before < forecast(scheduler, 8) < 2.2 * before


def test_forecasts_are_of_slow_moments_where_the_speed_changes():
    scheduler = make_scheduler(policy="token_budget")
    before = forecast(scheduler, 128)
    table_seconds = 0.0
    for number in range(30):
        add(scheduler, 128)
        batch = scheduler.schedule(float(number))
        table_seconds = table_seconds or batch.seconds
        run(scheduler, batch, table_seconds * (1.5 if number % 3 == 0 else 1.0))

    assert forecast(scheduler, 128) == pytest.approx(1.5 * before, rel=0.1)
    # the predicted time of a batch is the usual one
    add(scheduler, 128)
    assert scheduler.schedule(40.0).seconds == pytest.approx(table_seconds, rel=0.1)


def test_a_batch_that_will_run_alone_is_expected_to_end_sooner():
    scheduler = make_scheduler(policy="token_budget", slots=2)
    usual = cost_table().seconds(BatchShape.of([128]))

    for number in range(8):
        add(scheduler, 128)
        batch = scheduler.schedule(float(number))
        run(scheduler, batch, 0.6 * usual, cores="all")

    add(scheduler, 128)
    alone = scheduler.schedule(20.0)
    add(scheduler, 128)
    beside = scheduler.schedule(20.0)
    assert alone.seconds == pytest.approx(0.6 * usual)
    assert beside.seconds == pytest.approx(usual)
    # what has run on all cores for a part of its time says nothing
    run(scheduler, alone, 9 * usual, cores="both")
    run(scheduler, beside, usual)
    # other sizes are not known
    add(scheduler, 16)
    few = scheduler.schedule(21.0)
    assert few.seconds == pytest.approx(cost_table().seconds(BatchShape.of([16])), rel=0.01)
    run(scheduler, few, few.seconds)
    add(scheduler, 128)
    assert scheduler.schedule(22.0).seconds == pytest.approx(0.6 * usual, rel=0.01)


def test_one_slow_batch_moves_the_forecast_by_little():
    scheduler = make_scheduler(policy="token_budget")
    before = forecast(scheduler, 128)
    add(scheduler, 128)

    run(scheduler, scheduler.schedule(0.0), 100.0)

    # a batch that took thousands of times as long moves it by less than a tenth
    assert before <= forecast(scheduler, 128) <= 1.1 * before


def test_a_batch_is_cut_down_to_sequences_that_are_not_finished():
    scheduler = make_scheduler(policy="token_budget")
    gone, stays = add(scheduler, 5, 5), add(scheduler, 7)
    batch = scheduler.schedule(0.0)
    assert scheduler.trim(batch, 0.0) is batch

    scheduler.remove(gone)
    left = scheduler.trim(batch, 0.0)
    assert (lengths_of(left), left.shape) == ([7], BatchShape.of([7]))
    assert left.seconds == pytest.approx(cost_table().seconds(left.shape))

    scheduler.remove(stays)
    assert scheduler.trim(left, 0.0) is None


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_batch_delays_requests_until_it_has_ended_or_is_dropped(removed):
    scheduler = make_scheduler(cost_table(lambda n, length: 1.0))
    requests = [add(scheduler, 5) for _ in range(2)]
    batch = scheduler.schedule(0.0)
    # its part of a full batch takes less, another batch before it more
    with pytest.raises(DeadlineError):
        add(scheduler, 5, deadline=0.5)
    for request in requests[:removed]:
        scheduler.remove(request)

    batch = scheduler.trim(batch, 0.0)
    if batch is not None:
        run(scheduler, batch)

    add(scheduler, 5, deadline=0.5)


def test_every_sequence_of_a_batch_that_ran_is_finished():
    scheduler = make_scheduler(policy="token_budget", max_batch_tokens=10)
    request = add(scheduler, 5, 5, 5)

    first = run(scheduler, scheduler.schedule(0.0))
    assert [event.sequence.row for event in first] == [0, 1]
    assert request.unfinished

    run(scheduler, scheduler.schedule(0.0))
    assert not request.unfinished


def test_a_removed_request_leaves_nothing_behind_and_its_outputs_are_ignored():
    scheduler = make_scheduler(policy="token_budget", max_batch_tokens=10)
    gone = add(scheduler, 5, 5, 5)
    batch = scheduler.schedule(0.0)

    scheduler.remove(gone)

    assert run(scheduler, batch) == []
    assert scheduler.wake_at(math.inf) is None


def test_parts_of_a_batch_that_ran_out_of_memory_run_before_anything_else():
    scheduler = make_scheduler(policy="token_budget")
    add(scheduler, 1, 2, 3)
    batch = scheduler.schedule(0.0)
    add(scheduler, 4)

    assert scheduler.update(batch, BatchResult([], 1.0, failure="memory")) == []

    assert scheduler.wake_at(5.0) == 5.0
    assert [lengths_of(scheduler.schedule(5.0)) for _ in range(3)] == [[1], [2, 3], [4]]


def test_drain_ends_the_wait_for_fuller_batches():
    scheduler = make_scheduler(trigger="lazy", max_delay_ms=1000)
    add(scheduler, 5)
    assert scheduler.schedule(0.0) is None

    scheduler.drain()

    assert scheduler.schedule(0.0) is not None


def forecast(scheduler, length):
    """Return the expected seconds of a request that is not queued."""
    return scheduler._forecaster.forecast([length]).seconds


def test_waiting_work_is_subtracted_row_by_row():
    """Rows of a large request that have run no longer count as waiting."""
    scheduler = make_scheduler(policy="token_budget", max_batch_tokens=10)
    request = add(scheduler, *[5] * 100)
    admission = scheduler._admission
    whole = admission._wait_seconds(math.inf)

    for _ in range(49):
        run(scheduler, scheduler.schedule(0.0))
    assert admission._wait_seconds(math.inf) == pytest.approx(whole / 50)
    assert admission.depth == (1, 10)

    scheduler.remove(request)
    assert (admission._wait_seconds(math.inf), admission.depth) == (0.0, (0, 0))


def test_a_removed_request_that_never_reached_the_queue_leaves_no_count():
    scheduler = make_scheduler()
    request = add(scheduler, 5, 6)
    scheduler._queue.discard(request)

    scheduler.remove(request)

    assert scheduler._admission.depth == (0, 0)
