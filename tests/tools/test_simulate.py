"""Policies on a virtual clock: their gain, their promises, and that no request is lost.

Every run is a function of its seed: nothing here depends on how fast this machine is.
"""

import random
import re
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.costs.model import CostModel
from varlen.errors import DeadlineError, QueueFullError
from varlen_tools.simulate.__main__ import app
from varlen_tools.simulate.costs import cpu_seconds, gpu_seconds
from varlen_tools.simulate.run import simulate
from varlen_tools.simulate.study import full_load, measure, most_within
from varlen_tools.workloads import (
    Arrival,
    burst_arrivals,
    poisson_arrivals,
    with_deadline,
)

MIX = range(5, 501)
SEQUENCES = 20
NO_CAP = 10**9
# seconds since the last arrival, tokens, priority, deadline
ARRIVAL = st.tuples(
    st.floats(0, 0.2), st.integers(1, 500), st.integers(0, 9), st.none() | st.floats(0.01, 1)
)


def table(seconds=cpu_seconds, execution="packed"):
    return CostModel.of_function(seconds, execution, max_sequences=SEQUENCES, max_length=500)


def config(policy, execution="packed", **settings):
    limits = {"max_batch_sequences": SEQUENCES, "max_batch_tokens": 4096}
    queue = {"max_queued_requests": NO_CAP, "max_queued_tokens": NO_CAP}
    return EngineConfig(**{"policy": policy, "execution": execution, **limits, **queue, **settings})


def point(policy, load, seconds=cpu_seconds, execution="packed", count=2000, seeds=(0, 1)):
    """Return mean latency, p99 and served/s, the means of runs of these seeds."""
    rate = load * full_load(table(seconds), [252, 253], SEQUENCES)
    found = [
        measure(
            config(policy, execution),
            lambda: table(seconds, execution),
            poisson_arrivals(count, rate, MIX, seed),
            rate,
        )
        for seed in seeds
    ]
    assert all(one.lost == 0 for one in found)
    return tuple(fmean(getattr(one, name) for one in found) for name in ("mean", "p99", "served"))


@pytest.mark.parametrize("load", [0.1, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("seconds", [cpu_seconds, gpu_seconds], ids=["cpu", "gpu"])
def test_packed_dp_is_nowhere_worse_than_a_token_budget(seconds, load):
    # a p99 is known from few requests; a light load is simple, and takes the simulator longest
    many = {"count": 1000 if load < 0.5 else 6000, "seeds": (0, 1, 2)}
    mean, p99, _ = point("dp", load, seconds, **many)
    budget_mean, budget_p99, _ = point("token_budget", load, seconds, **many)

    assert mean <= 1.02 * budget_mean
    assert p99 <= 1.02 * budget_p99


@pytest.mark.parametrize("load, least", [(0.6, 0.10), (0.8, 0.08)])
def test_packed_dp_answers_sooner_where_tokens_are_costly(load, least):
    # ten such runs of 6,000 differ by 3 %, shorter ones by more
    many = {"count": 6000, "seeds": (0, 1, 2)}
    mean, _, _ = point("dp", load, **many)
    budget, _, _ = point("token_budget", load, **many)

    assert mean <= (1 - least) * budget


@pytest.mark.parametrize("believed", [0.5, 1.5, 3.0])
def test_packed_dp_is_not_much_worse_where_costs_are_known_badly(believed):
    """A first start on a busy machine leaves such costs."""
    rate = 0.9 * full_load(table(), [252, 253], SEQUENCES)
    arrivals = poisson_arrivals(3000, rate, MIX, seed=0)

    def run(policy):
        wrong = table(lambda n, length: believed * cpu_seconds(n, length))
        return simulate(arrivals, config(policy), wrong, actual=table()).latencies

    dp, budget = run("dp"), run("token_budget")

    assert fmean(dp) <= 1.05 * fmean(budget)
    assert dp[int(0.99 * len(dp))] <= 1.1 * budget[int(0.99 * len(budget))]


def test_a_rush_does_not_make_long_waits_usual_for_those_who_come_after():
    """40 requests at once, then a light load: later requests wait much less."""
    rush = [Arrival(0.0, 400) for _ in range(40)]
    after = [
        Arrival(5.0 + arrival.at, arrival.tokens)
        for arrival in poisson_arrivals(400, 50.0, MIX, seed=1)
    ]

    run = simulate(rush + after, config("dp", max_wait_ms=5000), table())

    assert max(outcome.seconds for outcome in run.outcomes[:40]) > 0.4
    assert max(outcome.seconds for outcome in run.outcomes[40:]) < 0.3


def test_a_load_that_rises_and_falls_costs_the_slowest_nothing():
    """The wait that was usual under a heavy load must not delay later requests."""
    full = full_load(table(), [252, 253], SEQUENCES)
    arrivals: list[Arrival] = []
    for number in range(30):
        begin = arrivals[-1].at + 2.0 if arrivals else 0.0
        part = poisson_arrivals(100, (0.5, 0.85)[number % 2] * full, MIX, seed=number)
        arrivals += [Arrival(begin + arrival.at, arrival.tokens) for arrival in part]

    def slowest_of_each_load(policy):
        latencies = [
            outcome.seconds for outcome in simulate(arrivals, config(policy), table()).outcomes
        ]
        return [max(latencies[i : i + 100]) for i in range(0, len(latencies), 100)]

    dp, budget = slowest_of_each_load("dp"), slowest_of_each_load("token_budget")

    assert fmean(dp) <= 1.02 * fmean(budget)


def test_padded_dp_serves_more_at_overload_and_answers_much_sooner_below_it():
    def both(load):
        return [
            point(policy, load, execution="padded", seeds=(0,)) for policy in ("dp", "token_budget")
        ]

    (_, _, served), (_, _, budget_served) = both(2.0)
    (mean, _, _), (budget_mean, _, _) = both(0.6)

    assert served >= 1.5 * budget_served
    assert mean <= budget_mean / 5


@pytest.mark.parametrize("policy", ["none", "fifo", "token_budget", "dp"])
@pytest.mark.parametrize("execution", ["packed", "padded"])
@pytest.mark.parametrize("trigger", ["hungry", "lazy"])
def test_every_request_is_answered_once_and_no_batch_passes_a_limit(policy, execution, trigger):
    run = simulate(
        burst_arrivals(1500, 80.0, MIX, seed=3),
        config(policy, execution, trigger=trigger),
        table(execution=execution),
    )

    assert all(outcome.answers == 1 and outcome.error is None for outcome in run.outcomes)
    for shape in run.batches:
        held = shape.sequences * shape.longest if execution == "padded" else shape.tokens
        assert held <= 4096
        assert policy == "token_budget" or shape.sequences <= SEQUENCES
    sent = Counter(outcome.arrival.tokens for outcome in run.outcomes)
    assert sum(shape.tokens for shape in run.batches) == sum(n * k for n, k in sent.items())


def test_twenty_thousand_requests_and_none_is_lost():
    arrivals = poisson_arrivals(20_000, 900.0, MIX, seed=5)

    run = simulate(arrivals, config("dp", max_queued_requests=400), table(gpu_seconds))

    assert all(outcome.answers == 1 for outcome in run.outcomes)
    assert run.refused(QueueFullError) > 1000
    assert len(run.latencies) + run.refused(QueueFullError) == len(arrivals)


def test_a_run_is_a_function_of_its_seed():
    def latencies(seed):
        run = simulate(poisson_arrivals(500, 80.0, MIX, seed), config("dp"), table())
        return [outcome.seconds for outcome in run.outcomes]

    assert latencies(1) == latencies(1)
    assert latencies(1) != latencies(2)


def adversary(count, rate, seed):
    """Return short requests near full load, with a few long ones among them."""
    numbers = random.Random(seed)
    short = poisson_arrivals(count, rate, range(4, 9), seed)
    return [Arrival(arrival.at, 500) if numbers.random() < 0.02 else arrival for arrival in short]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_long_do_not_starve_among_the_short(seed):
    settings = config("dp", max_wait_ms=200)

    run = simulate(adversary(4000, 1200.0, seed), settings, table())

    long = [outcome.seconds for outcome in run.outcomes if outcome.arrival.tokens == 500]
    assert len(long) > 40
    # the bound, the batch that ran when it was reached, and one's own; and those who were due before
    batch = table().seconds(BatchShape.of([500] * 8))
    assert max(long) <= 0.2 + 3 * batch


@pytest.mark.parametrize("policy", ["token_budget", "dp"])
@pytest.mark.parametrize("rows", [16, 64])
def test_a_large_request_waits_at_most_about_twice_as_long_as_single_rows_at_overload(policy, rows):
    """The queue lets single rows pass a large request, but not for ever."""
    single = [Arrival(each.at, 64) for each in poisson_arrivals(9000, 900.0, [64], seed=0)]
    large = [Arrival(at, 64, rows=rows) for at in (2.0, 4.0, 6.0)]
    arrivals = sorted([*single, *large], key=lambda arrival: arrival.at)

    run = simulate(arrivals, config(policy, max_queued_requests=1000), table())

    seconds = {
        is_large: [
            outcome.seconds
            for outcome in run.outcomes
            if outcome.error is None and (outcome.arrival.rows > 1) == is_large
        ]
        for is_large in (True, False)
    }
    assert run.refused(QueueFullError) > 100
    assert len(seconds[True]) >= 1
    assert max(seconds[True]) <= 2.5 * max(seconds[False])


def test_requests_with_a_deadline_keep_it_or_are_refused_at_once():
    rate = 2.0 * full_load(table(), [252, 253], SEQUENCES)
    arrivals = with_deadline(poisson_arrivals(3000, rate, MIX, seed=7), 0.5)

    run = simulate(arrivals, config("dp"), table())

    refused = [outcome for outcome in run.outcomes if isinstance(outcome.error, DeadlineError)]
    at_once = [outcome for outcome in refused if outcome.seconds == 0.0]
    accepted = len(arrivals) - len(at_once)
    kept = sum(seconds <= 0.5 for seconds in run.latencies)
    assert len(refused) > 500
    assert kept >= 0.99 * accepted
    # and no more are refused than have to be
    assert run.served_per_second >= 0.85 * rate / 2
    assert re.fullmatch(
        r"deadline missed: the answer is expected in about \d+ ms, the deadline is in 500 ms",
        str(at_once[0].error),
    )


def test_a_deadline_is_kept_although_costs_are_known_badly():
    """The table says half of what batches take at first, and learns."""
    actual = table()
    believed = table(lambda n, length: cpu_seconds(n, length) / 2)
    rate = 2.0 * full_load(actual, [252, 253], SEQUENCES)

    run = simulate(
        with_deadline(poisson_arrivals(4000, rate, MIX, seed=8), 0.5),
        config("dp"),
        believed,
        actual=actual,
    )

    late = [outcome for outcome in run.outcomes[2000:] if outcome.seconds > 0.5]
    assert len(late) <= 0.01 * 2000
    # what left the queue is not held against those who come later
    served = [outcome for outcome in run.outcomes[3000:] if outcome.error is None]
    assert len(served) >= 0.4 * 1000


@pytest.mark.parametrize("policy", ["token_budget", "dp"])
def test_priority_is_answered_sooner_under_load(policy):
    numbers = random.Random(4)
    arrivals = [
        Arrival(arrival.at, arrival.tokens, priority=9 if numbers.random() < 0.1 else 0)
        for arrival in poisson_arrivals(3000, 100.0, MIX, seed=4)
    ]

    run = simulate(arrivals, config(policy), table())

    urgent = fmean(o.seconds for o in run.outcomes if o.arrival.priority)
    usual = fmean(o.seconds for o in run.outcomes if not o.arrival.priority)
    assert urgent < 0.8 * usual


def test_lazy_batches_are_larger_and_wait_no_longer_than_the_delay():
    arrivals = poisson_arrivals(1000, 20.0, MIX, seed=2)

    hungry = simulate(arrivals, config("token_budget"), table())
    lazy = simulate(arrivals, config("token_budget", trigger="lazy", max_delay_ms=100), table())

    assert len(lazy.batches) < 0.7 * len(hungry.batches)
    longest = table().seconds(BatchShape.of([500] * 8))
    assert max(lazy.latencies) <= 0.1 + 2 * longest


@settings(deadline=None, max_examples=25)
@given(
    st.lists(ARRIVAL, min_size=1, max_size=60),
    st.sampled_from(["none", "fifo", "token_budget", "dp"]),
    st.sampled_from(["hungry", "lazy"]),
    st.sampled_from(["packed", "padded"]),
)
def test_whatever_comes_is_answered_once(stream, policy, trigger, execution):
    at, arrivals = 0.0, []
    for gap, tokens, priority, deadline in stream:
        at += gap
        arrivals.append(Arrival(at, tokens, priority, deadline))

    run = simulate(arrivals, config(policy, execution, trigger=trigger), table(execution=execution))

    assert [outcome.arrival for outcome in run.outcomes] == arrivals
    assert all(outcome.answers == 1 for outcome in run.outcomes)
    assert all(outcome.end >= outcome.arrival.at for outcome in run.outcomes)


def test_the_most_within_a_latency_is_where_latency_passes_it():
    def arrivals(rate):
        return poisson_arrivals(1500, rate, MIX, 0)

    most = most_within(config("token_budget"), table, arrivals, p99=0.3, upper=300.0)

    below = measure(config("token_budget"), table, arrivals(0.98 * most), 0.98 * most)
    above = measure(config("token_budget"), table, arrivals(1.1 * most), 1.1 * most)
    assert below.p99 <= 0.3 < above.p99


def test_the_command_prints_and_writes_every_policy(tmp_path):
    trace, table = tmp_path / "trace.csv", tmp_path / "results.csv"
    trace.write_text("tokens\n" + "\n".join(map(str, range(5, 500, 5))))

    done = CliRunner().invoke(
        app,
        [
            *("--policies", "token_budget,dp/padded", "--trace", str(trace)),
            *("--loads", "0.5", "--count", "200", "--goal-ms", "300", "--table", str(table)),
        ],
    )

    assert done.exit_code == 0, done.output
    assert "token_budget, packed" in done.output
    assert re.search(r"dp, padded: \d+\.\d requests per second with a p99 of 300 ms", done.output)
    header, *rows = table.read_text().splitlines()
    assert header.startswith("policy,execution,offered,served,")
    assert [row.split(",")[0] for row in rows] == ["token_budget", "dp"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--policies", "lifo"), 'policy is "lifo"; allowed: none, fifo, token_budget, dp'),
        (("--lengths", "9"), 'lengths are "9"; allowed: two whole numbers, such as 5-500'),
        (("--lengths", "5-9000"), "a batch has at most 4096"),
        (("--loads", "0.5,much"), 'loads are "0.5,much"; allowed: numbers with commas between'),
        (
            ("--costs", "measured", "--cache-folder", "CACHE"),
            "the cache has no costs of packed batches",
        ),
    ],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path, arguments, message):
    arguments = [str(tmp_path) if word == "CACHE" else word for word in arguments]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})

    assert done.exit_code == 2
    assert message in done.output
