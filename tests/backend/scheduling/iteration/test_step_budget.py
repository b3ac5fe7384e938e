"""Steps are large, except beside streams, whose next tokens they delay."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backend.scheduling.iteration.generation import Bench, answer, source_of, tokens_of
from tests.backend.scheduling.iteration.test_iteration import prompt_of
from varlen.scheduling.iteration.step_size import PROMPT_PART, StepCost, tokens_of_step

# costs of a step in seconds, and a target that 38 tokens keep
BASE, PER_TOKEN, LATENCY = 0.05, 0.002, 0.1261


def seconds_of(step):
    return BASE + PER_TOKEN * step.shape.tokens


def bench_of_streams(**limits):
    """Return a bench whose steps may have 64 tokens, and 38 beside a stream."""
    defaults = {"num_blocks": 600, "step_tokens": 64, "latency": LATENCY, "longest": 2000}
    bench = Bench(**(defaults | limits))
    bench.executor.seconds = seconds_of
    return bench


def start_stream(bench, **options):
    """Let a sequence generate until the cost of steps is known."""
    for length in (300, 40):
        bench.submit(prompt_of(length), max_tokens=2)
        bench.run_all()
    reply = bench.submit(prompt_of(4), max_tokens=30, **options)
    bench.step()
    bench.step()
    return reply


def sizes_of(bench, steps):
    return [bench.step().shape.tokens for _ in range(steps)]


def test_a_prompt_beside_a_stream_runs_in_steps_of_the_target():
    bench = bench_of_streams()
    start_stream(bench, streams=True)

    bench.submit(prompt_of(100), max_tokens=1)

    assert sizes_of(bench, 4) == [38, 38, 27, 1]


@pytest.mark.parametrize(
    "limits, options",
    [
        ({}, {}),
        ({"latency": 0.0}, {"streams": True}),
        ({}, {"streams": True, "num_beams": 2}),
    ],
    ids=["whole answer", "no target", "search"],
)
def test_a_prompt_runs_in_the_largest_steps_where_no_stream_has_a_target(limits, options):
    bench = bench_of_streams(**limits)
    start_stream(bench, **options)

    bench.submit(prompt_of(100), max_tokens=1)

    assert sizes_of(bench, 1) == [64]


def test_a_stream_without_a_token_yet_runs_in_the_largest_steps():
    bench = bench_of_streams()
    start_stream(bench)

    bench.submit(prompt_of(100), max_tokens=1, streams=True)

    assert sizes_of(bench, 1) == [64]


def test_prompts_have_a_quarter_of_steps_that_decoding_makes_longer_than_the_target():
    bench = bench_of_streams(latency=0.01)
    start_stream(bench, streams=True)

    bench.submit(prompt_of(100), max_tokens=1)

    seconds = seconds_of(bench.step())
    # the stream and the first token of the prompt run in any case
    limit = (BASE + 2 * PER_TOKEN) / (1 - PROMPT_PART)
    assert limit - PER_TOKEN - 1e-9 <= seconds <= limit + 1e-9


def test_a_source_runs_as_a_whole_beside_streams():
    bench = bench_of_streams(latency=0.01)
    start_stream(bench, streams=True)

    bench.submit([1], max_tokens=1, source=list(range(1, 60)))

    step = bench.step()
    assert [len(chunk.encodes) for chunk in step.chunks] == [0, 59]
    assert source_of(step.chunks[1].sequence) == list(step.chunks[1].encodes)


def part(tokens, *, is_streaming=False):
    first = SimpleNamespace(token_ids=[1, 2], num_tokens=1, num_computed=1, num_unknown=0)
    running = SimpleNamespace(streams=is_streaming, first=first)
    return SimpleNamespace(least_tokens=tokens, group=running)


@given(
    base=st.floats(0, 1),
    per_token=st.floats(1e-6, 1e-2),
    learned=st.lists(st.integers(1, 600), min_size=3, max_size=30),
    streams=st.integers(1, 64),
    others=st.lists(st.integers(1, 300), max_size=4),
    max_tokens=st.integers(64, 2048),
    latency=st.floats(1e-3, 2),
)
def test_a_step_keeps_the_target_or_gives_prompts_no_more_than_their_part(
    base, per_token, learned, streams, others, max_tokens, latency
):
    cost = StepCost()
    for tokens in learned:
        cost.learn(tokens, base + per_token * tokens)
    parts = [part(1, is_streaming=True)] * streams + [part(tokens) for tokens in others]
    least = sum(each.least_tokens for each in parts)

    tokens = tokens_of_step(parts, max_tokens, cost, latency)

    assert 0 < tokens <= max_tokens
    if len(set(learned[1:])) > 1 and tokens > least:
        limit = max(latency, cost.seconds(1, least) / (1 - PROMPT_PART))
        assert cost.seconds(1, tokens) <= limit * (1 + 1e-6)
        # a larger step would be too long, or its cost unknown
        is_known = tokens + 1 <= 2 * max(*learned[1:], least)
        assert tokens == max_tokens or not is_known or cost.seconds(1, tokens + 1) > limit * 0.999


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=8),
    gaps=st.lists(st.integers(0, 4), min_size=8, max_size=8),
    latency=st.floats(0.01, 0.3),
)
def test_streams_get_their_tokens_in_time_and_every_prompt_ends(lengths, gaps, latency):
    bench = bench_of_streams(latency=latency)
    start_stream(bench, streams=True)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    steps, replies = [], []
    for prompt, gap in zip(prompts, gaps, strict=False):
        replies.append(bench.submit(prompt, max_tokens=20, streams=True))
        steps += filter(None, (bench.step() for _ in range(gap)))
    steps += bench.run_all()

    assert [tokens_of(reply)[0] for reply in replies] == [answer(each, 20) for each in prompts]
    for before, after in pairwise(steps):
        streaming = {chunk.sequence for chunk in before.chunks if chunk.samples}
        if not streaming.intersection(after.sequences):
            continue
        least = BASE + PER_TOKEN * len(after.chunks)
        assert seconds_of(after) <= max(latency, least / (1 - PROMPT_PART)) + 1e-6


def test_a_step_has_the_limit_whose_cost_is_known_to_be_small():
    cost = StepCost()
    for tokens in (1, 300, 1, 300):
        cost.learn(tokens, 1e-3)

    assert tokens_of_step([part(1, is_streaming=True)], 512, cost, 0.01) == 512
