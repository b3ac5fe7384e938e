"""Random streams of samples, beam searches and source texts.

Answers are right, and blocks are conserved. The bench checks each step, what each row of it reads from KV memory, and
the blocks after it.
"""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.fakes.engine_parts import FakeReply
from tests.backend.scheduling.iteration.generation import Bench, answer, search_answers, tokens_of
from varlen.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
)
from varlen.request.generation import GenerationOptions
from varlen.scheduling.iteration.speculation import Speculation

_POLICIES = ["reserve", "optimistic"]


def expected_of(prompts, *, max_tokens, n=1, num_beams=1, source=None, **_):
    """Return the tokens of each row of an answer."""
    if num_beams == 1 and source is None:
        return [answer(prompt, max_tokens, sample) for prompt in prompts for sample in range(n)]
    options = GenerationOptions(max_tokens=max_tokens, n=n, num_beams=num_beams)
    return [each for prompt in prompts for each in search_answers(prompt, source or [], options)]


def random_request(rng):
    """Return the prompt and the options of a request."""
    beginning = [1, 2, 3] * rng.randint(0, 5)
    prompt = beginning + [rng.randint(1, 11) for _ in range(rng.randint(1, 12))]
    options = {"max_tokens": rng.randint(1, 16)}
    kind = rng.choice(["samples", "samples", "beams", "source"])
    if kind == "samples":
        return prompt, {**options, "n": rng.choice([1, 1, 2, 3])}
    if kind == "source":
        prompt, options["source"] = prompt[:2], prompt[:6]
    num_beams = rng.randint(1 if kind == "source" else 2, 4)
    return prompt, {**options, "num_beams": num_beams, "n": rng.randint(1, num_beams)}


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(
    "mode",
    [{"slots": 1}, {"slots": 2}, {"stages": 2}, {"stages": 3}],
    ids=["one by one", "ahead", "two stages", "three stages"],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
def test_a_stream_under_pressure_ends_with_every_answer_right(policy, prefix_cache, mode, seed):
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.randint(14, 18),
        policy=policy,
        prefix_cache=prefix_cache,
        step_tokens=rng.randint(7, 24),
        latency=rng.choice([0.0, 4.0]),
        running=6,
        short_slots=rng.randint(0, 2),
        short_tokens=14,
        **mode,
    )
    bench.executor.seconds = lambda step: 1.0 + 0.5 * step.shape.tokens
    asked = []
    for _ in range(80):
        prompt, options = random_request(rng)
        try:
            streams, priority = rng.random() < 0.5, rng.choice([0, 0, 5])
            reply = bench.submit(prompt, **options, streams=streams, priority=priority)
        except RequestError:
            # more blocks than there are
            continue
        asked.append((reply, expected_of([prompt], **options)))
        for _ in range(rng.choice([0, 0, 1, 4])):
            bench.step()
    bench.run_all()

    assert [reply.end for reply, _ in asked] == ["finished"] * len(asked)
    assert [list(map(tokens_of(r).get, range(len(e)))) for r, e in asked] == [e for _, e in asked]
    assert any(step.copies for step in bench.executor.steps)
    assert any(step.after is not None for step in bench.executor.steps) == (
        "slots" in mode and mode["slots"] == 2
    )
    counts = bench.scheduler.snapshot()
    assert counts.preemptions > 0 or policy == "reserve"
    assert (counts.blocks.prefix_hit_tokens > 0) == prefix_cache
    bench.check_idle()


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("slots", [1, 2], ids=["one by one", "ahead"])
@pytest.mark.parametrize("seed", range(2))
def test_launches_of_several_steps_change_no_answer(policy, slots, seed, monkeypatch):
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", 1e6)
    rng = random.Random(seed)
    bench = Bench(num_blocks=40, policy=policy, step_tokens=24, slots=slots, launch_steps=3)
    asked = []
    for _ in range(40):
        prompt, options = random_request(rng)
        # prompts of one token begin in a launch
        prompt = prompt[: rng.choice([1, 9])]
        asked.append((bench.submit(prompt, **options), expected_of([prompt], **options)))
        for _ in range(rng.choice([0, 2, 9])):
            if rng.random() < 0.1:
                bench.executor.failures = [rng.choice(["memory", "memory late"])]
            bench.step()
    bench.run_all()

    answered = [each for each in asked if each[0].end == "finished"]
    # the others were alone in a step that ran out of memory
    failed = [reply.end for reply, _ in asked if reply.end != "finished"]
    assert all(isinstance(end, EngineError) for end in failed)
    assert len(answered) > len(asked) / 2
    for reply, expected in answered:
        assert [tokens_of(reply).get(row) for row in range(len(expected))] == expected
    assert max(step.steps for step in bench.executor.steps) > 1
    bench.check_idle()


def submit_if_admitted(bench, prompts, cancelled_after, **options):
    """Submit a request; return its prompts, options and reply, or nothing if it is refused."""
    if options["source"] is not None:
        # the engine takes no source that is longer than a step
        options["source"] = options["source"][: bench.limits.max_step_tokens]
    reply = FakeReply(cancelled_after=cancelled_after)
    try:
        bench.submit(*prompts, **options, reply=reply)
    except (RequestError, QueueFullError, DeadlineError):
        assert reply.end is None
        return []
    return [(prompts, options, reply)]


# few token ids and small blocks: many prompts begin alike
_TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=20)
_SAMPLES = st.fixed_dictionaries(
    {"n": st.sampled_from([1, 1, 1, 2, 3]), "source": st.none()},
)
_WIDTHS = st.integers(1, 5).flatmap(
    lambda num_beams: st.fixed_dictionaries(
        {"num_beams": st.just(num_beams), "n": st.integers(1, num_beams)}
    )
)
_SEARCHES = st.builds(
    lambda options_of_beams, source: {**options_of_beams, "source": source},
    _WIDTHS,
    st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=10),
)
_REQUEST = st.builds(
    lambda choice, others: {**others, **choice},
    _SAMPLES | _SEARCHES,
    st.fixed_dictionaries(
        {
            "prompts": st.lists(_TOKENS, min_size=1, max_size=2),
            "max_tokens": st.integers(1, 12),
            "priority": st.sampled_from([0, 0, 0, 1]),
            "streams": st.booleans(),
            "cancelled_after": st.sampled_from([math.inf, math.inf, math.inf, 0, 1, 4]),
            "deadline": st.sampled_from([None, None, None, 3.5, 9.5]),
        }
    ),
)
_FAILURES = ["memory", "memory late", "batch", "worker"]


_ANYTHING = given(
    actions=st.lists(
        st.one_of(
            _REQUEST,
            st.sampled_from(["step", "step", "step", "start", "cancel", "late", *_FAILURES]),
        ),
        max_size=30,
    ),
    policy=st.sampled_from(_POLICIES),
    prefix_cache=st.booleans(),
    num_blocks=st.integers(4, 24),
    block_size=st.integers(1, 4),
    step_tokens=st.integers(1, 12),
    latency=st.sampled_from([0.0, 0.5, 3.0, 6.0]),
    running=st.integers(1, 6),
    short_slots=st.integers(0, 2),
    short_tokens=st.integers(0, 16),
    slots=st.sampled_from([1, 2]),
    stages=st.sampled_from([1, 2, 3]),
    pending=st.sampled_from([0.0, 0.0, 0.3]),
    speculation=st.sampled_from([None, Speculation(1, 1), Speculation(3, 1), Speculation(3, 0)]),
    seed=st.integers(0, 100),
)


@settings(max_examples=250)
@_ANYTHING
def test_whatever_happens_answers_are_right_and_blocks_return(**what):
    let_happen(**what)


@pytest.mark.full
@settings(max_examples=1000)
@_ANYTHING
def test_whatever_else_happens_answers_are_right_and_blocks_return(**what):
    let_happen(**what)


def let_happen(actions, pending, seed, **limits):
    """Run these actions; fail unless answers are right and all blocks return."""
    bench = Bench(**limits, max_requests=6)
    rng = random.Random(seed)
    bench.executor.is_pending = lambda _: rng.random() < pending
    bench.executor.is_wrong = lambda: rng.random() < 0.3
    bench.executor.seconds = lambda step: 1.0 + 0.5 * step.shape.tokens
    asked = []
    for action in actions:
        if isinstance(action, dict):
            asked += submit_if_admitted(bench, **action)
        elif action == "step":
            bench.step()
        elif action == "start":
            # what follows happens while a step is in flight
            bench.engine.step()
        elif action == "cancel" and asked:
            asked[-1][-1].cancelled = True
        elif action == "late":
            bench.clock.now += 4.0
        elif action in _FAILURES:
            bench.executor.failures.append(action)
        bench.check_blocks()
    bench.run_all()

    for prompts, options, reply in asked:
        expected = expected_of(prompts, **options)
        for row, tokens in tokens_of(reply).items():
            assert tokens == expected[row][: len(tokens)]
        if reply.end == "finished":
            assert list(map(tokens_of(reply).get, range(len(expected)))) == expected
        else:
            assert isinstance(reply.end, (RequestCancelled, DeadlineError, EngineError))
    bench.check_idle()
