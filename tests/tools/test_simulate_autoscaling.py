"""Autoscaling on a virtual clock: its rule, its delays, and that it loses no request."""

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest

from varlen.config import NO_LIMIT, EngineConfig
from varlen_tools.simulate.autoscaling import AutoscaleOptions, Autoscaler, Scrape
from varlen_tools.simulate.batches import full_load
from varlen_tools.simulate.costs import CostSource, cost_models
from varlen_tools.simulate.replicas import FleetOptions, simulate_fleet
from varlen_tools.simulate.routing import Routing
from varlen_tools.workloads import Arrival, named_mix, poisson_arrivals

from .commands import run_varlen

MIX = named_mix("short", 500).lengths
CONFIG = EngineConfig(policy="dp", max_queued_requests=NO_LIMIT, max_queued_tokens=NO_LIMIT)
FAST = AutoscaleOptions(
    1, 8, scrape_seconds=1.0, decision_seconds=1.0, startup_seconds=2.0, down_seconds=20.0
)


@cache
def fitted():
    return cost_models(CostSource.cpu, max_sequences=64, longest=500)("packed")


def stream(count, load):
    """Return arrivals at a load of one replica."""
    return poisson_arrivals(count, load * full_load(fitted(), MIX, 64), MIX, 0)


def run(arrivals, replicas, autoscale=FAST, routing=Routing.least_requests):
    options = FleetOptions(replicas, autoscale=autoscale)
    return simulate_fleet(arrivals, CONFIG, deepcopy(fitted()), options, routing)


def span(fleet_run):
    return max(o.end for o in fleet_run.outcomes) - fleet_run.outcomes[0].arrival.at


@pytest.mark.parametrize(
    "load, queued_seconds, replicas",
    [(2.1, 0.0, 3), (2.11, 0.0, 4), (2.1, 4.5, 5), (0.0, 0.0, 2), (0.0, 1000.0, 9)],
    ids=["load", "rounded up", "queue", "least", "most"],
)
def test_the_larger_of_load_and_queue_decides(load, queued_seconds, replicas):
    autoscaler = Autoscaler(AutoscaleOptions(2, 9), 0.0, 2)

    assert autoscaler.decide(15.0, Scrape(load, queued_seconds)) == replicas


def test_replicas_are_removed_once_no_recent_decision_needs_them():
    autoscaler = Autoscaler(AutoscaleOptions(1, 9, down_seconds=300.0), 0.0, 1)
    busy, idle = Scrape(4.2, 0.0), Scrape(0.7, 0.0)

    decided = [autoscaler.decide(at, s) for at, s in ((15, busy), (30, idle), (315, idle))]

    assert decided == [6, 6, 6]
    assert autoscaler.decide(330, idle) == 1


@pytest.mark.parametrize("routing", Routing, ids=lambda routing: routing.value)
def test_replicas_come_under_load_and_every_request_is_answered_once(routing):
    arrivals = stream(2500, 3.0)

    grown = run(arrivals, 1, routing=routing)

    assert grown.most_replicas > 3
    assert sum(count > 0 for count in grown.sent) > 3
    assert [outcome.arrival for outcome in grown.outcomes] == arrivals
    assert all(outcome.answers == 1 and outcome.error is None for outcome in grown.outcomes)


def test_replicas_that_go_answer_their_requests_first():
    arrivals = stream(2500, 0.5)

    shrunk = run(arrivals, 8, routing=Routing.random)

    assert all(outcome.answers == 1 and outcome.error is None for outcome in shrunk.outcomes)
    assert sum(shrunk.sent) == len(arrivals)
    assert shrunk.replica_seconds < 0.6 * 8 * span(shrunk)


def test_a_queue_as_a_signal_starts_more_replicas_than_load_does():
    """Load is at most 1 for each replica, however many requests wait."""
    arrivals = stream(6000, 3.0)
    late = replace(FAST, most=32, scrape_seconds=5.0, decision_seconds=5.0)

    both, by_load, fixed = (
        run(arrivals, 1, autoscale) for autoscale in (late, replace(late, queued_seconds=1e9), None)
    )

    assert both.most_replicas > by_load.most_replicas
    assert both.longest_wait < by_load.longest_wait < 0.5 * fixed.longest_wait


def test_a_new_replica_takes_requests_after_its_start():
    arrivals = stream(3000, 3.0)

    slow = run(arrivals, 1, replace(FAST, startup_seconds=1e6))

    assert slow.most_replicas > 3
    assert slow.sent[1:] == [0] * 7


def test_the_seconds_of_a_fixed_number_of_replicas_last_until_the_last_answer():
    fixed = run(stream(300, 1.0), 3, None)

    assert fixed.replica_seconds == pytest.approx(3 * span(fixed))
    assert fixed.most_replicas == 3


def test_the_longest_wait_ends_where_a_batch_starts():
    """The second request waits for the batch of the first one."""
    fixed = run([Arrival(0.0, 500), Arrival(0.01, 500)], 1, None)

    assert fixed.longest_wait == pytest.approx(fixed.outcomes[0].seconds - 0.01)


def test_the_command_prints_the_longest_wait_and_replica_seconds(tmp_path):
    results = tmp_path / "results.csv"

    done = run_varlen(
        "simulate",
        *("--replicas", "1", "--autoscale", "1:4", "--scrape-seconds", "1"),
        *("--decision-seconds", "1", "--startup-seconds", "1", "--policies", "dp"),
        *("--loads", "2", "--count", "1500", "--workers", "1", "--table", results),
    )

    assert done.exit_code == 0, done.output
    assert "longest wait" in done.output
    assert "replica-seconds, at most 4 replicas" in done.output
    assert ",1:4," in results.read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--replicas 2 --autoscale 3", 'autoscale is "3"; allowed: MIN:MAX'),
        ("--replicas 2 --autoscale 1:90000", "at most 10000"),
        ("--replicas 2 --autoscale 3:8", "allowed: MIN:MAX with 1 <= MIN <= replicas <= MAX"),
        ("--replicas 2 --autoscale 0:8", "allowed: MIN:MAX with 1 <= MIN <= replicas <= MAX"),
        ("--replicas 2 --autoscale 2:8 --dead-seconds 3", "--dead-seconds is for a fixed number"),
        ("--replicas 2 --autoscale 2:8 --goal-p99 3", "--goal-p99 is for a fixed number"),
        ("--autoscale 2:8", "need --replicas"),
    ],
)
def test_the_command_refuses_options_that_do_not_fit(arguments, message):
    done = run_varlen("simulate", *arguments.split())

    assert done.exit_code == 2
    assert message in done.output
