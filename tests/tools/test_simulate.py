"""Policies on a virtual clock: their gain, their promises, and that no request is lost.

Every run is a function of its seed: nothing here depends on how fast this machine is.
"""

import random
import re
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from statistics import fmean
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.config import EngineConfig, PolicyName
from varlen.costs.model import BatchShape, CostModel
from varlen.errors import DeadlineError, QueueFullError
from varlen_bench.simulate.__main__ import app
from varlen_bench.simulate.batches import BatchStudy, full_load, simulate
from varlen_bench.simulate.costs import cpu_seconds, gpu_seconds
from varlen_bench.workloads import Arrival, burst_arrivals, poisson_arrivals, with_deadline

from .commands import run_app

MIX, SHORT = range(5, 501), range(2, 101)
SEQUENCES = 64
NO_CAP = 10**9
POLICIES = get_args(PolicyName)
# seconds since the last arrival, tokens, rows, priority, deadline
ARRIVAL = st.tuples(
    st.floats(0, 0.2),
    st.integers(1, 500),
    st.sampled_from([1, 1, 1, 2, 9]),
    st.integers(0, 9),
    st.none() | st.floats(0.01, 1),
)


def core_seconds(count, length):
    """Return the seconds of a batch on a core ten times as fast as usual."""
    return cpu_seconds(count, length) / 10


@cache
def fitted(seconds, execution):
    return CostModel.of_function(seconds, execution, max_sequences=SEQUENCES, max_length=500)


def table(seconds=core_seconds, execution="packed"):
    """Return costs of a function; a run refines its own."""
    return deepcopy(fitted(seconds, execution))


def config(policy, execution="packed", **settings):
    limits = {"max_batch_sequences": SEQUENCES, "max_batch_tokens": 4096}
    queue = {"max_queued_requests": NO_CAP, "max_queued_tokens": NO_CAP}
    return EngineConfig(**{"policy": policy, "execution": execution, **limits, **queue, **settings})


def full(seconds=core_seconds, mean=252, workers=1):
    """Return the requests per second of full batches."""
    return full_load(table(seconds), [mean], SEQUENCES, workers=workers)


def large_arrivals(count, rate, seed):
    """Return arrivals; three in ten have 2 to 32 rows."""
    numbers = random.Random(seed)
    return [
        replace(arrival, rows=numbers.randint(2, 32)) if numbers.random() < 0.3 else arrival
        for arrival in poisson_arrivals(count, rate, SHORT, seed)
    ]


def study(count, lengths=MIX, seed=0, *, seconds=core_seconds, workers=1):
    """Return the study of Poisson arrivals."""
    return BatchStudy(
        partial(table, seconds),
        lambda rate: poisson_arrivals(count, rate, lengths, seed),
        workers,
    )


def ratios(load, *, seconds=core_seconds, workers=1, lengths=MIX, count=1000):
    """Return mean latency and p99 of `dp`, each divided by a token budget's."""
    rate = load * full(seconds, round(fmean(lengths)), workers)
    studies = [study(count, lengths, n, seconds=seconds, workers=workers) for n in range(3)]
    ours, budget = (
        [each.measure(config(policy), rate) for each in studies]
        for policy in ("dp", "token_budget")
    )
    assert all(one.lost == 0 for one in (*ours, *budget))
    return [
        fmean(getattr(one, name) for one in ours) / fmean(getattr(one, name) for one in budget)
        for name in ("mean", "p99")
    ]


def by_size(run):
    """Return ascending latencies of answered requests of one row, and of those with several."""
    return [
        sorted(
            o.seconds for o in run.outcomes if o.error is None and (o.arrival.rows > 1) == is_large
        )
        for is_large in (False, True)
    ]


def together(*arrivals):
    return sorted(chain(*arrivals), key=lambda arrival: arrival.at)


def p99(ascending):
    return ascending[int(0.99 * len(ascending))]


@pytest.mark.full
@pytest.mark.parametrize("load", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("lengths", [MIX, SHORT], ids=["long", "short"])
@pytest.mark.parametrize(
    "seconds, workers",
    [(core_seconds, 1), (core_seconds, 4), (gpu_seconds, 1)],
    ids=["core", "4 cores", "gpu"],
)
def test_dp_is_nowhere_worse_than_a_token_budget(seconds, workers, lengths, load):
    mean, p99 = ratios(load, seconds=seconds, workers=workers, lengths=lengths)

    assert mean <= 1.02
    # less than a hundredth of 3,000 requests decide it
    assert p99 <= 1.12


@pytest.mark.full
@pytest.mark.parametrize(
    "lengths, load, most",
    [(MIX, 0.6, 0.85), (MIX, 0.8, 0.75), (SHORT, 0.6, 0.95), (SHORT, 0.8, 0.9)],
    ids=["long 0.6", "long 0.8", "short 0.6", "short 0.8"],
)
def test_two_cores_answer_sooner_than_with_a_token_budget(lengths, load, most):
    mean, p99 = ratios(load, workers=2, lengths=lengths)

    assert mean <= most
    assert p99 <= 0.85


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.full)])
def test_requests_of_one_row_do_not_wait_for_large_ones(workers):
    # as many rows per second as full batches of 51 tokens, at a load of about 0.6
    rate = 0.6 * full(mean=51, workers=workers) / 5.8
    arrivals = large_arrivals(800, rate, seed=0)

    (single, large), (budget_single, budget_large) = (
        by_size(simulate(arrivals, config(policy), table(), workers=workers))
        for policy in ("dp", "token_budget")
    )

    assert fmean(single) <= 0.6 * fmean(budget_single)
    # their rows are spread over all workers
    assert fmean(large) <= 1.02 * fmean(budget_large)


def test_long_rows_of_one_client_delay_others_by_one_row_at_most():
    """Nothing interrupts a batch, so it is kept small; the large request takes hardly longer."""
    short = poisson_arrivals(1200, 120.0, range(4, 35), seed=0)
    large = [Arrival(at, 256, rows=64) for at in (1.0, 4.0, 7.0)]
    # a row and the request itself, which may wait for another one
    most = core_seconds(1, 256) + 2 * core_seconds(2, 34)

    (others, client), (_, client_alone) = (
        by_size(simulate(together(short, large), config(policy), table(), workers=2))
        for policy in ("dp", "token_budget")
    )

    assert p99(others) <= most
    assert fmean(client) <= 1.15 * fmean(client_alone)


def test_work_is_spread_over_idle_workers():
    """A single request of many rows is answered sooner by more workers."""
    seconds = [
        simulate([Arrival(0.0, 50, rows=32)], config("dp"), table(), workers=n).outcomes[0].seconds
        for n in (1, 2, 4)
    ]

    assert seconds[1] <= 0.6 * seconds[0]
    assert seconds[2] <= 0.4 * seconds[0]


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_it_answers_sooner_where_workers_slow_down_at_random(workers):
    rate = 0.7 * full(workers=workers)
    arrivals = poisson_arrivals(2000, rate, MIX, seed=0)

    def mean(policy):
        numbers, costs = random.Random(1), table()

        def actual(shape):
            return costs.seconds(shape) * numbers.choice([0.9, 1.0, 1.0, 1.1, 2.0])

        return fmean(
            simulate(arrivals, config(policy), table(), actual=actual, workers=workers).latencies
        )

    assert mean("dp") <= 0.9 * mean("token_budget")


@pytest.mark.full
@pytest.mark.parametrize("believed", [0.5, 1.5, 3.0])
def test_it_is_not_worse_where_costs_are_known_badly(believed):
    """A first start on a busy machine leaves such costs."""
    rate = 0.9 * full()
    arrivals = poisson_arrivals(3000, rate, MIX, seed=0)

    def run(policy):
        wrong = table(lambda n, length: believed * core_seconds(n, length))
        return simulate(arrivals, config(policy), wrong, actual=table().seconds).latencies

    ours, budget = run("dp"), run("token_budget")

    assert fmean(ours) <= fmean(budget)
    assert p99(ours) <= 1.1 * p99(budget)


@pytest.mark.full
def test_padded_it_serves_more_at_overload_and_answers_much_sooner_below_it():
    def both(load):
        rate = load * full()
        return [study(1000).measure(config(policy, "padded"), rate) for policy in ("dp", "fifo")]

    ours, fifo = both(2.0)
    assert ours.served >= 1.5 * fifo.served
    ours, fifo = both(0.6)
    assert ours.mean <= fifo.mean / 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("execution", ["packed", "padded"])
@pytest.mark.parametrize("trigger", ["hungry", "lazy"])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 3])
def test_every_request_is_answered_once_and_no_batch_passes_a_limit(
    policy, execution, trigger, workers
):
    run = simulate(
        burst_arrivals(800, 80.0, MIX, seed=3),
        config(policy, execution, trigger=trigger),
        table(execution=execution),
        workers=workers,
    )

    assert all(outcome.answers == 1 and outcome.error is None for outcome in run.outcomes)
    for shape in run.batches:
        held = shape.sequences * shape.longest if execution == "padded" else shape.tokens
        assert held <= 4096
        assert policy == "token_budget" or shape.sequences <= SEQUENCES
    sent = Counter(outcome.arrival.tokens for outcome in run.outcomes)
    assert sum(shape.tokens for shape in run.batches) == sum(n * k for n, k in sent.items())


@pytest.mark.full
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


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_long_do_not_starve_among_the_short(seed, workers):
    """They wait about as long as in order of arrival, and their own time.

    As many tokens of newer requests as a request has may pass it, and a running batch is not interrupted.
    """
    own = core_seconds(1, 500)
    rate = 0.95 * full(mean=16, workers=workers)
    arrivals = adversary(4000, rate, seed)

    def longest(policy):
        run = simulate(arrivals, config(policy), table(), workers=workers)
        return max(o.seconds for o in run.outcomes if o.arrival.tokens == 500)

    assert longest("dp") <= 1.1 * longest("token_budget") + 2 * own


@pytest.mark.parametrize("policy", [pytest.param("token_budget", marks=pytest.mark.full), "dp"])
@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.full)])
def test_a_large_request_waits_at_most_about_twice_as_long_as_single_rows_at_overload(policy, rows):
    """The queue lets single rows pass a large request, but not for ever."""
    single = [Arrival(each.at, 64) for each in poisson_arrivals(9000, 900.0, [64], seed=0)]
    large = [Arrival(at, 64, rows=rows) for at in (2.0, 4.0, 6.0)]

    run = simulate(together(single, large), config(policy, max_queued_requests=1000), table())

    of_one_row, of_many = by_size(run)
    assert run.refused(QueueFullError) > 100
    assert len(of_many) >= 1
    assert of_many[-1] <= 2.5 * of_one_row[-1]


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.full)])
def test_requests_with_a_deadline_keep_it_or_are_refused_at_once(workers):
    rate = 2.0 * full(workers=workers)
    arrivals = with_deadline(poisson_arrivals(3000, rate, MIX, seed=7), 0.5)

    run = simulate(arrivals, config("dp"), table(), workers=workers)

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


@pytest.mark.parametrize("scatter", [0.0, pytest.param(0.4, marks=pytest.mark.full)])
def test_refusals_at_twice_the_load_cost_no_throughput(scatter):
    """Batches take a factor of exp(scatter) longer or shorter than expected."""
    numbers, actual = random.Random(9), table()
    arrivals = poisson_arrivals(3000, 2.0 * full(workers=2), MIX, seed=9)

    def run(arrivals):
        return simulate(
            arrivals,
            config("dp"),
            table(),
            actual=lambda shape: numbers.lognormvariate(0.0, scatter) * actual.seconds(shape),
            workers=2,
        )

    everything = run(arrivals)
    possible = sum(a.tokens for a in arrivals) / max(o.end for o in everything.outcomes)
    limited = run(with_deadline(arrivals, 0.5))

    in_time = [outcome for outcome in limited.answered if outcome.seconds <= 0.5]
    tokens = sum(outcome.arrival.tokens for outcome in in_time)
    assert tokens / max(outcome.end for outcome in in_time) >= 0.9 * possible
    assert len(in_time) >= 0.99 * len(limited.answered)
    # long requests are refused more often, and never all
    longest = [outcome for outcome in in_time if outcome.arrival.tokens > 450]
    assert len(longest) >= 0.1 * sum(arrival.tokens > 450 for arrival in arrivals)


def test_a_deadline_is_kept_although_costs_are_known_badly():
    """The table says half of what batches take at first, and learns."""
    actual = table()
    believed = table(lambda n, length: core_seconds(n, length) / 2)
    rate = 2.0 * full()

    run = simulate(
        with_deadline(poisson_arrivals(4000, rate, MIX, seed=8), 0.5),
        config("dp"),
        believed,
        actual=actual.seconds,
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


@settings(max_examples=25)
@given(
    st.lists(ARRIVAL, min_size=1, max_size=60),
    st.sampled_from(POLICIES),
    st.sampled_from(["hungry", "lazy"]),
    st.sampled_from(["packed", "padded"]),
    st.integers(1, 4),
)
def test_whatever_comes_is_answered_once(stream, policy, trigger, execution, workers):
    at, arrivals = 0.0, []
    for gap, tokens, rows, priority, deadline in stream:
        at += gap
        arrivals.append(Arrival(at, tokens, priority, deadline, rows))

    run = simulate(
        arrivals,
        config(policy, execution, trigger=trigger),
        table(execution=execution),
        workers=workers,
    )

    assert [outcome.arrival for outcome in run.outcomes] == arrivals
    assert all(outcome.answers == 1 for outcome in run.outcomes)
    assert all(outcome.end >= outcome.arrival.at for outcome in run.outcomes)


@pytest.mark.full
def test_the_most_within_a_latency_is_where_latency_passes_it():
    load, policy = study(1500), config("token_budget")

    most = load.most_within(policy, p99=0.3, upper=300.0)

    below, above = (load.measure(policy, factor * most) for factor in (0.98, 1.1))
    assert below.p99 <= 0.3 < above.p99


@pytest.mark.full
def test_the_command_prints_and_writes_every_policy(tmp_path):
    trace, table = tmp_path / "trace.csv", tmp_path / "results.csv"
    trace.write_text("tokens\n" + "\n".join(map(str, range(5, 500, 5))))

    done = run_app(
        app,
        *("--policies", "token_budget,dp/padded", "--trace", trace, "--loads", "0.5"),
        *("--count", "200", "--goal-ms", "300", "--table", table),
    )

    assert done.exit_code == 0, done.output
    assert "token_budget, packed" in done.output
    assert re.search(r"dp, padded: \d+\.\d requests per second with a p99 of 300 ms", done.output)
    header, *rows = table.read_text().splitlines()
    assert header.startswith("policy,execution,workers,offered,served,")
    assert [row.split(",")[0] for row in rows] == ["token_budget", "dp"]


@pytest.mark.full
def test_the_grid_compares_policies_in_every_cell(tmp_path):
    table = tmp_path / "grid.csv"

    done = run_app(
        app,
        "grid",
        *("--policies", "dp,none", "--lengths", "mixed,rows", "--workers", "1,2"),
        *("--loads", "0.6", "--seeds", "1", "--count", "60", "--table", table),
    )

    assert done.exit_code == 0, done.output
    assert "geometric mean" in done.output
    header, *rows = [line.split(",") for line in table.read_text().splitlines()]
    assert header[:5] == ["costs", "lengths", "workers", "load", "policy"]
    # a GPU has one worker
    cells = [("cpu", "1"), ("cpu", "2"), ("gpu", "1")]
    assert Counter((row[0], row[2]) for row in rows) == dict.fromkeys(cells, 2 * 3)
    assert {row[4] for row in rows} == {"dp", "none", "token_budget"}
    assert all(0 < float(row[7]) <= float(row[8]) for row in rows)


def test_the_example_of_the_paper_is_three_batches_if_they_pad_and_one_if_not():
    padded, packed = (run_app(app, "partition", *options) for options in ([], ["--packed"]))

    assert re.search(r"best partition │ 17, 18 \| 52, 63 \| 77 ", padded.output)
    assert re.search(r"best partition │ 17, 18, 52, 63, 77 .*│ 1.00x", packed.output)


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        ("", "--policies lifo", 'policy is "lifo"; allowed: none, fifo, token_budget, dp'),
        ("", "--lengths 9", 'lengths are "9"; allowed: two whole numbers, such as 5-500'),
        ("", "--lengths 5-9000", "a batch has at most 4096"),
        ("", "--loads 0.5,much", 'loads are "0.5,much"; allowed: numbers with commas between'),
        ("", "--costs measured --cache-folder .", "the cache has no costs of packed batches"),
        ("grid", "--lengths long", '"long" is not known; allowed: uniform, short, mixed, rows'),
        ("grid", "--costs tpu", '"tpu" is not known; allowed: cpu, gpu'),
        ("grid", "--workers 0", 'workers are "0"; allowed: numbers above 0'),
        ("grid", "--workers 1.5", 'workers are "1.5"; allowed: whole numbers from 1'),
        ("grid", "--loads 0", 'loads are "0"; allowed: numbers above 0'),
        ("grid", "--loads inf", 'loads are "inf"; allowed: numbers above 0'),
        ("grid", "--over lifo", 'policy is "lifo"; allowed: none, fifo, token_budget, dp'),
        *(
            ("partition", lengths, f'lengths are "{lengths}"; allowed: ')
            for lengths in ("17,0", "17.5", "inf", "nan", "a")
        ),
    ],
)
def test_a_command_refuses_what_it_cannot_do(tmp_path, monkeypatch, command, arguments, message):
    monkeypatch.chdir(tmp_path)

    done = run_app(app, *command.split(), *arguments.split())

    assert done.exit_code == 2
    assert message in done.output
