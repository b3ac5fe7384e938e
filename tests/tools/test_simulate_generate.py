"""Generation on a virtual clock: policies and step sizes, their promises and their costs.

Every run is a function of its seed, but for the measurement of a model.
"""

import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import save_checkpoint
from varlen.config import EngineConfig
from varlen.errors import RequestError
from varlen_bench.simulate.__main__ import app
from varlen_bench.simulate.costs import StepCosts
from varlen_bench.simulate.measured_steps import fit, measure
from varlen_bench.simulate.steps import Step, StepStudy, simulate
from varlen_bench.workloads import Arrival, generation_arrivals

from .commands import run_app
from .conftest import read_csv

COSTS = StepCosts(20e-3, 700e-6, 5e-6)
BLOCKS = 512
POLICIES = ["reserve", "optimistic"]
both_policies = pytest.mark.parametrize("policy", POLICIES)
# seconds since the last arrival, tokens of prompt and answer
ARRIVAL = st.tuples(st.floats(0, 0.5), st.integers(1, 300), st.integers(1, 60))


def config(policy="reserve", max_step_tokens=128, **settings):
    limits = {
        "max_running_sequences": 32,
        "kv_block_tokens": 16,
        "inter_token_latency_ms": 0,
        **settings,
    }
    queue = {"max_queued_requests": 10**9, "max_queued_tokens": 10**9}
    return EngineConfig(
        task="generate", kv_policy=policy, max_step_tokens=max_step_tokens, **limits, **queue
    )


def study(count=300, seed=0, blocks=BLOCKS, max_tokens=None):
    return StepStudy(generation_arrivals(count, seed), COSTS, blocks, max_tokens)


def assert_idle(run):
    """Assert that nothing runs, waits or holds a block after a run."""
    end = run.end
    assert (end.running, end.waiting, end.blocks.used, end.blocks.reserved) == (0, 0, 0, 0)


def test_a_run_is_a_function_of_its_seed():
    one = study(100).measure(config(), 3.0)

    assert one == study(100).measure(config(), 3.0)
    assert one != study(100, seed=1).measure(config(), 3.0)


@settings(max_examples=40)
@given(
    st.lists(ARRIVAL, min_size=1, max_size=40),
    st.sampled_from(POLICIES),
    st.sampled_from([32, 100, 1000]),
    st.sampled_from([None, 80]),
)
def test_whatever_comes_is_answered_once_and_every_block_is_free_at_the_end(
    stream, policy, max_step_tokens, max_tokens
):
    at, arrivals = 0.0, []
    for gap, tokens, generated in stream:
        at += gap
        arrivals.append(Arrival(at, tokens, generated=generated))

    # 400 tokens, so that sequences wait for blocks
    run = simulate(
        arrivals, config(policy, max_step_tokens), 25, COSTS.seconds, max_tokens=max_tokens
    )

    assert [outcome.arrival for outcome in run.outcomes] == arrivals
    assert all(outcome.answers == 1 and outcome.error is None for outcome in run.outcomes)
    assert [len(outcome.sent) for outcome in run.outcomes] == [each.generated for each in arrivals]
    assert all(outcome.sent[0] > outcome.arrival.at for outcome in run.outcomes)
    assert_idle(run)


@both_policies
@pytest.mark.parametrize("max_step_tokens", [32, 256])
def test_steps_keep_to_their_limits_and_compute_every_token(policy, max_step_tokens):
    load = study(150, blocks=128)

    run = load.run(config(policy, max_step_tokens), 4.0)

    assert all(step.tokens <= max_step_tokens for step in run.steps)
    assert all(step.blocks_used <= step.blocks_reserved <= 128 for step in run.steps)
    # the last token of an answer is never computed
    least = sum(each.tokens + each.generated - 1 for each in load.arrivals)
    computed = sum(step.tokens for step in run.steps)
    assert computed > least if run.end.preemptions else computed == least


@pytest.mark.full
def test_reserve_never_preempts_and_optimistic_does_where_blocks_are_few():
    load = study(blocks=64, max_tokens=128)

    reserve = load.measure(config("reserve"), 4.0)
    optimistic = load.measure(config("optimistic"), 4.0)

    assert reserve.preemptions == 0
    assert optimistic.preemptions > 0


@pytest.mark.full
def test_optimistic_starts_answers_sooner_where_they_are_shorter_than_max_tokens():
    load = study(blocks=256, max_tokens=512)

    reserve = load.measure(config("reserve"), 3.0)
    optimistic = load.measure(config("optimistic"), 3.0)

    assert optimistic.ttft_p50 < 0.5 * reserve.ttft_p50
    # what is reserved is not used
    assert reserve.reserved > 0.9
    assert optimistic.used > 1.2 * reserve.used


def test_chunks_of_prompts_lower_the_largest_gap_between_tokens():
    short = [Arrival(0.0, 16, generated=60) for _ in range(8)]
    long = [Arrival(0.1 + number, 1000, generated=1) for number in range(3)]
    load = StepStudy(sorted([*short, *long], key=lambda arrival: arrival.at), COSTS, BLOCKS)
    rate = len(load.arrivals) / 2.0

    gaps = {size: load.measure(config("reserve", size), rate).gap for size in (64, 256, 1024)}

    assert gaps[64] < gaps[256] < gaps[1024]
    for size, gap in gaps.items():
        # a full step, which reads every context
        assert gap <= COSTS.of(size, 3 * 1001 + 8 * 76)
    assert gaps[1024] >= COSTS.of(1000, 0)


@pytest.mark.full
@pytest.mark.parametrize("load", [0.5, 1.5])
def test_a_target_bounds_the_gaps_between_tokens_and_keeps_the_throughput(load):
    whole = study(400, blocks=4096)
    rate = load * whole.full_load(32)

    small, large = (whole.measure(config("reserve", size), rate) for size in (64, 512))
    target = whole.measure(config("reserve", 512, inter_token_latency_ms=150), rate)

    # contexts that are read make steps of one size unequal
    assert target.gap_p99 <= 0.16 < large.gap_p99
    assert target.tokens >= 0.97 * large.tokens
    assert target.ttft_p50 < 0.9 * small.ttft_p50


def test_a_request_that_never_fits_is_refused_and_the_others_run():
    arrivals = [Arrival(0.0, 10_000, generated=1), Arrival(0.0, 10, generated=3)]

    run = simulate(arrivals, config(), BLOCKS, COSTS.seconds)

    assert isinstance(run.outcomes[0].error, RequestError)
    assert len(run.outcomes[1].sent) == 3
    assert StepStudy(arrivals, COSTS, BLOCKS).measure(config(), 1.0).refused == 1


def test_an_answer_ends_at_max_tokens():
    arrivals = [Arrival(0.0, 10, generated=9), Arrival(0.0, 10, generated=2)]

    run = simulate(arrivals, config(), BLOCKS, COSTS.seconds, max_tokens=4)

    assert [len(outcome.sent) for outcome in run.outcomes] == [4, 2]


def test_times_are_those_of_the_steps():
    load = StepStudy([Arrival(0.0, 100, generated=4), Arrival(1e3, 1, generated=1)], COSTS, BLOCKS)

    result = load.measure(config(), 0.001)

    decode = [COSTS.of(1, 100 + number) for number in (1, 2, 3)]
    assert result.ttft_p99 == pytest.approx(COSTS.of(100, 100), rel=1e-6)
    assert result.token_p50 == pytest.approx(sum(decode) / 3, rel=1e-6)
    assert result.gap == pytest.approx(decode[-1], rel=1e-6)


@pytest.mark.full
def test_a_full_load_is_about_what_is_served_at_overload():
    load, running = study(count=1000, blocks=4096), config("reserve", 512)

    one = load.full_load(running.max_running_sequences)

    result = load.measure(running, 2 * one)
    generated = sum(arrival.generated for arrival in load.arrivals) / 1000
    assert result.tokens == pytest.approx(one * generated, rel=0.1)
    assert result.kept_up < 0.6


@pytest.mark.full
@pytest.mark.parametrize("limits", [{"ttft": 0.5, "token": 0.2}, {"ttft": 5.0, "token": 0.06}])
def test_the_highest_rate_is_where_a_limit_is_passed(limits):
    load = study(100)

    most = load.most_within(config(), **limits, upper=10.0)

    below, above = (load.measure(config(), factor * most) for factor in (1.0, 1.15))
    assert below.ttft_p99 <= limits["ttft"]
    assert below.token_p99 <= limits["token"]
    assert above.ttft_p99 > limits["ttft"] or above.token_p99 > limits["token"]


def test_a_fit_finds_the_costs_of_its_steps():
    sizes = [(1, 50), (1, 1000), (8, 900), (32, 700), (128, 128), (512, 1100)]
    steps = [Step(tokens, kv, COSTS.of(tokens, kv), 0, 0) for tokens, kv in sizes]
    # one repeat of three was disturbed
    slow = [replace(step, seconds=9 * step.seconds) for step in steps]

    costs, error = fit([*steps, *slow, *steps])

    assert error == pytest.approx(0, abs=1e-9)
    assert (costs.step, costs.token, costs.kv_token) == pytest.approx(
        (COSTS.step, COSTS.token, COSTS.kv_token)
    )


def test_costs_are_read_as_they_are_written():
    assert str(StepCosts.parse("12345,700.5,0.012345")) == "12300,700,0.0123"
    assert StepCosts.parse("20000,700,5") == COSTS


def test_costs_of_a_model_are_measured(tmp_path):
    folder = save_checkpoint(tmp_path / "gpt2", "GPT2LMHeadModel")

    costs, error = measure(folder, {"kv_bytes": "1%"})

    assert min(costs.step, costs.token, costs.kv_token) >= 0
    assert 0 < costs.of(1, 1) <= costs.of(512, 1000)
    assert error >= 0


@pytest.mark.full
def test_the_command_prints_and_writes_every_policy_and_size(tmp_path):
    trace, table = tmp_path / "trace.csv", tmp_path / "results.csv"
    times = (f"2023-11-16 18:15:{second:02}.6805900" for second in range(60))
    rows = [f"{time},{50 + 3 * i},{1 + i % 20}" for i, time in enumerate(times)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))

    done = run_app(
        app,
        "generate",
        *("--trace", trace, "--stream", "trace", "--loads", "0.3,0.6", "--table", table),
        *("--max-step-tokens", "64,256", "--inter-token-latency-ms", "0,90"),
        *("--ttft-ms", "900", "--token-ms", "100"),
    )

    assert done.exit_code == 0, done.output
    assert "60 requests per run" in done.output
    for policy in POLICIES:
        assert re.search(
            rf"{policy}, 256, 90: \d+\.\d\d requests per second with a p99 first token of 900 ms and time per token"
            r" of 100 ms",
            " ".join(done.output.split()),
        )
    settings = ("policy", "max_step_tokens", "inter_token_latency_ms")
    found = [tuple(row[name] for name in settings) for row in read_csv(table)]
    assert found == 2 * list(product(POLICIES, ("64", "256"), ("0", "90")))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--policies", "lifo"), 'kv_policy is "lifo"; allowed: reserve, optimistic'),
        (("--max-step-tokens", "32"), "max_step_tokens is 32; it must hold a token of each of"),
        (
            ("--inter-token-latency-ms", "soon"),
            'inter_token_latency_ms are "soon"; allowed: numbers',
        ),
        (("--costs", "1,2"), 'costs are "1,2"; allowed: microseconds of a step, a token'),
        (("--costs", "0,0,5"), 'costs are "0,0,5"; allowed: microseconds'),
        (("--loads", "much"), 'loads are "much"; allowed: numbers with commas between'),
        (("--stream", "trace"), "stream is trace; it needs --trace"),
        (("--trace", __file__), "is no trace of requests"),
        (("--model", "EMPTY"), "has neither config.pbtxt nor config.json"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path, arguments, message):
    done = run_app(app, "generate", *(tmp_path if word == "EMPTY" else word for word in arguments))

    assert done.exit_code == 2
    assert message in done.output
