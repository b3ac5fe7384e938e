"""Replicas behind a router on a virtual clock: the seed fixes every figure."""

import csv
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from statistics import fmean

import numpy as np
import pytest

from varlen.config import NO_LIMIT, EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import DeadlineError
from varlen_tools.simulate.batches import BatchStudy, full_load, simulate
from varlen_tools.simulate.costs import CostSource, cost_models
from varlen_tools.simulate.fleet_study import FleetStudy
from varlen_tools.simulate.replicas import FleetOptions, simulate_fleet
from varlen_tools.simulate.routing import ReplicaLoads, Routing, new_router
from varlen_tools.workloads import Arrival, named_mix, poisson_arrivals, with_deadline

from .commands import run_varlen

MIX = named_mix("mixed", 500).lengths


@cache
def fitted():
    return cost_models(CostSource.cpu, max_sequences=64, longest=500)("packed")


def table(execution="packed"):
    return deepcopy(fitted())


def config(policy="dp"):
    return EngineConfig(policy=policy, max_queued_requests=NO_LIMIT, max_queued_tokens=NO_LIMIT)


def rate(load, replicas=1, workers=1):
    """Return the requests per second of a load of all replicas."""
    return load * replicas * full_load(table(), MIX, 64, workers=workers)


def stream(count, load, replicas, seed=0):
    return poisson_arrivals(count, rate(load, replicas), MIX, seed)


def run(options, routing=Routing.least_requests, *, count=1500, load=0.8, arrivals=None):
    arrivals = stream(count, load, options.replicas) if arrivals is None else arrivals
    return simulate_fleet(arrivals, config(), table(), options, routing)


def router(routing, open_requests, *, is_up=None, queued_tokens=None, seed=0):
    loads = ReplicaLoads(
        is_up=np.array([True] * len(open_requests) if is_up is None else is_up),
        open_requests=np.array(open_requests),
        queued_tokens=lambda: np.array(queued_tokens),
    )
    return new_router(routing, loads, seed)


@pytest.mark.parametrize("routing", Routing, ids=lambda routing: routing.value)
@pytest.mark.parametrize("policy", ["dp", "fifo"])
@pytest.mark.parametrize("workers", [1, 3])
def test_one_replica_has_the_figures_of_an_engine_without_a_router(policy, routing, workers):
    def arrivals(rate):
        return poisson_arrivals(600, rate, MIX, 0)

    offered = rate(0.9, workers=workers)
    plain = BatchStudy(table, arrivals, workers).measure(config(policy), offered)
    fleet = FleetStudy(table, arrivals, FleetOptions(1, workers)).measure(
        config(policy), offered, routing
    )

    shared = asdict(plain).keys() & asdict(fleet).keys()
    assert shared >= {"served", "mean", "p50", "p99", "refused", "lost"}
    assert {name: getattr(fleet, name) for name in shared} == {
        name: getattr(plain, name) for name in shared
    }


def test_one_replica_answers_each_request_at_the_time_of_an_engine_without_a_router():
    """Several requests come at the same time."""
    arrivals = [Arrival(0.1 * (i // 5), 40) for i in range(200)]

    plain = simulate(arrivals, config(), table())
    fleet = run(FleetOptions(1), arrivals=arrivals)

    assert fleet.outcomes == plain.outcomes


@pytest.fixture(scope="module")
def means():
    """Mean latency of 16 replicas at load 0.8, by routing."""
    return {
        routing: fmean(run(FleetOptions(16), routing, count=4000).latencies) for routing in Routing
    }


@pytest.mark.parametrize(
    "other", [each for each in Routing if each is not Routing.least_requests], ids=lambda r: r.value
)
def test_least_requests_answers_sooner_than_every_other_routing(means, other):
    assert means[Routing.least_requests] < 0.8 * means[other]


def test_two_choices_lie_between_random_and_least_requests(means):
    assert means[Routing.two_choices] < 0.7 * means[Routing.random]


def test_old_queued_tokens_herd_and_fresh_ones_do_not(means):
    fresh = run(FleetOptions(16, metrics_age=0.0), Routing.queued_tokens, count=4000)

    assert means[Routing.queued_tokens] > means[Routing.random]
    assert fmean(fresh.latencies) < 0.5 * means[Routing.queued_tokens]


def test_the_seed_fixes_the_result():
    first, again, other = (
        run(FleetOptions(4, seed=seed, dead_seconds=1.0), Routing.two_choices) for seed in (1, 1, 2)
    )

    assert first == again
    assert first.sent != other.sent


@pytest.mark.parametrize("routing", Routing, ids=lambda routing: routing.value)
@pytest.mark.parametrize("replicas", [2, 5])
def test_a_dead_replica_loses_nothing(routing, replicas):
    arrivals = stream(1500, 0.9, replicas)

    died = run(FleetOptions(replicas, dead_seconds=3.0), routing, arrivals=arrivals)

    assert died.sent_again > 0
    assert [outcome.arrival for outcome in died.outcomes] == arrivals
    assert all(outcome.answers == len(outcome.sent) == 1 for outcome in died.outcomes)
    assert len(died.answered) == len(arrivals)
    assert sum(died.sent) == len(arrivals) + died.sent_again


def test_a_dead_replica_gets_no_requests_and_then_some_again():
    arrivals = [Arrival(float(at), 40) for at in range(100)]

    gone, back = (
        run(FleetOptions(2, dead_seconds=s), Routing.round_robin, arrivals=arrivals)
        for s in (1e6, 20.5)
    )

    # by turns until second 50, and again from second 71 on
    assert gone.sent == [75, 25]
    assert back.sent == [60, 40]


def test_a_batch_that_dies_counts_until_then_and_its_request_takes_its_whole_time():
    # of four, the second is on the second replica, which dies when the third one arrives
    arrivals = [Arrival(0.0, 40), Arrival(1.0, 500), Arrival(1.05, 40), Arrival(9.0, 40)]
    seconds = table().seconds(BatchShape.of([500]))

    died = run(FleetOptions(2, dead_seconds=5.0), Routing.round_robin, arrivals=arrivals)

    assert died.sent_again == 1
    assert died.outcomes[1].seconds >= 0.05 + seconds
    last = table().seconds(BatchShape.of([40]))
    assert died.busy_seconds[1] == pytest.approx(0.05 + last)


def test_a_request_sent_again_keeps_its_deadline():
    arrivals = with_deadline([Arrival(0.01 * i, 500) for i in range(3)], 0.25)

    died = run(FleetOptions(2, dead_seconds=9.0), Routing.round_robin, arrivals=arrivals)

    late = [o for o in died.outcomes if isinstance(o.error, DeadlineError)]
    assert late
    assert all(outcome.seconds <= 0.26 for outcome in died.outcomes if outcome.error is None)


def test_least_requests_sends_less_to_a_slow_replica_and_round_robin_does_not():
    options = FleetOptions(4, slow_factor=4.0)

    least, in_turn = (run(options, each) for each in (Routing.least_requests, Routing.round_robin))

    assert least.sent[0] < 0.6 * fmean(least.sent[1:])
    assert in_turn.sent == [375] * 4
    assert fmean(least.latencies) < 0.5 * fmean(in_turn.latencies)


def test_a_slow_replica_takes_its_factor_longer():
    arrivals = [Arrival(0.0, 100), Arrival(100.0, 100)]

    slow, fast = run(
        FleetOptions(2, slow_factor=3.0), Routing.round_robin, arrivals=arrivals
    ).busy_seconds

    assert slow == pytest.approx(3 * fast)


@pytest.mark.parametrize(
    "routing, numbers",
    [
        (Routing.round_robin, [0, 2, 3, 0, 2, 3]),
        (Routing.least_requests, [2] * 6),
        (Routing.queued_tokens, [3] * 6),
    ],
    ids=["round_robin", "least_requests", "queued_tokens"],
)
def test_a_router_passes_replicas_that_are_down(routing, numbers):
    choose = router(
        routing, [4, 0, 1, 2], is_up=[True, False, True, True], queued_tokens=[9, 0, 8, 7]
    )

    assert [choose() for _ in numbers] == numbers


@pytest.mark.parametrize(
    "routing", [Routing.random, Routing.two_choices, Routing.least_requests], ids=lambda r: r.value
)
def test_equal_replicas_get_requests_evenly(routing):
    choose = router(routing, [1, 1, 1, 1])

    counts = np.bincount([choose() for _ in range(4000)], minlength=4)

    assert counts.min() > 850


def test_two_choices_never_choose_the_busiest():
    choose = router(Routing.two_choices, [5, 9, 6])

    assert {choose() for _ in range(200)} == {0, 2}


def test_the_fewest_replicas_hold_the_goal_and_one_less_does_not():
    study = FleetStudy(table, lambda rate: poisson_arrivals(1000, rate, MIX, 0), FleetOptions(12))
    offered, least = rate(0.5, 12), Routing.least_requests

    fewest = study.fewest_within(config(), offered, least, p99=0.5)

    def p99(replicas):
        other = FleetStudy(table, study.make_arrivals, FleetOptions(replicas))
        return other.measure(config(), offered, least).p99

    assert p99(fewest) <= 0.5 < p99(fewest - 1)
    assert study.fewest_within(config(), offered, least, p99=0.01) is None


def test_the_command_prints_and_writes_every_routing(tmp_path):
    results = tmp_path / "results.csv"

    done = run_varlen(
        "simulate",
        *("--replicas", "3", "--routing", "random,least_requests", "--policies", "dp"),
        *("--loads", "0.5,0.8", "--count", "300", "--lengths", "mixed", "--workers", "1"),
        *("--dead-seconds", "1", "--goal-p99", "30", "--table", results),
    )

    assert done.exit_code == 0, done.output
    assert "least_requests, dp, packed" in done.output
    assert "random, dp: 2 replicas serve" in done.output
    rows = list(csv.DictReader(results.read_text().splitlines()))
    assert [row["routing"] for row in rows] == ["random", "least_requests"] * 2
    assert all(row["lost"] == "0" for row in rows)
    assert any(int(row["sent_again"]) > 0 for row in rows)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--replicas 2 --routing fastest", 'routing is "fastest"; allowed: random, round_robin'),
        ("--replicas 1 --dead-seconds 5", "--dead-seconds needs at least 2 replicas"),
        ("--slow-replica 2", "--goal-p99 and --autoscale need --replicas"),
        ("--replicas 2 --goal-ms 50", "--goal-ms is for one engine"),
    ],
)
def test_the_command_refuses_options_that_do_not_fit(arguments, message):
    done = run_varlen("simulate", *arguments.split())

    assert done.exit_code == 2
    assert message in done.output
