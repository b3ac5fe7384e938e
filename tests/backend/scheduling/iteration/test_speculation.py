"""Drafted tokens: what is drafted, and that answers are the ones without drafts."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backend.scheduling.iteration import generation
from tests.backend.scheduling.iteration.generation import (
    Bench,
    drafted_rows,
    tokens_of,
)
from tests.backend.scheduling.iteration.test_random_streams import (
    expected_of,
    random_request,
)
from varlen.errors import RequestError
from varlen.scheduling.iteration.speculation import UNKNOWN_GUESS, Drafter, Speculation
from varlen.scheduling.iteration.step_size import DraftCost

LIMITS = Speculation(num_tokens=4, shortest=2)
OF_MODEL = Speculation(num_tokens=4, shortest=0)


def drafter(**limits):
    return Drafter(Speculation(**{"num_tokens": 4, "shortest": 2, **limits}))


def draft_of(tokens, num_unknown=0, most=4, least=1e-9, **limits):
    """Return what a new drafter drafts behind some tokens."""
    return drafter(**limits).draft(tokens, num_unknown, most, least)[0]


def test_a_draft_is_what_followed_the_last_tokens_before():
    assert draft_of([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]


def test_tokens_that_are_not_known_yet_are_guessed_before_a_draft():
    assert draft_of([1, 2, 3, 4, 5, 6, 9, 1, 2], 1, 2) == [3, 4, 5]


def test_nothing_is_drafted_behind_new_tokens():
    assert draft_of([1, 2, 3, 4, 5, 6, 9, 1, 7]) == []
    assert draft_of([1, 2]) == []


def test_the_longest_of_several_places_is_taken_and_of_equal_ones_the_last():
    assert draft_of([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], most=1) == [3]
    assert draft_of([7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], most=1) == [4]


def test_a_draft_that_reaches_the_end_repeats_the_period():
    tokens = [5, 1, 2, 3, 1, 2, 3, 1, 2]
    assert draft_of(tokens, most=7, num_tokens=7) == [3, 1, 2, 3, 1, 2, 3]


def test_drafts_are_as_long_as_guesses_were_right_whether_they_ran_or_not():
    right, wrong = drafter(), drafter()
    lengths = []
    changing = [token for number in range(20) for token in (1, 2, 3 + number)]
    for one, tokens in ((right, [1, 2, 3] * 20), (wrong, changing)):
        drafts = [one.draft(tokens[:length], 0, 4, 0.5) for length in range(3, 60)]
        lengths.append([len(draft) for draft, _ in drafts])
        assert all(len(draft) >= expected for draft, expected in drafts)
    assert lengths[0][-1] == 4
    assert lengths[0] == sorted(lengths[0])
    assert max(lengths[1][8:]) == 0
    # what has to be likelier is drafted less
    assert right.draft([1, 2, 3] * 20, 0, 4, 1.0) == ([], 0.0)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 3), st.integers(0, 2))
def test_a_draft_follows_an_equal_ngram(tokens, shortest, unknown):
    one = drafter(shortest=shortest)
    draft = []
    for length in range(1, len(tokens) + 1):
        draft, _ = one.draft(tokens[:length], 0, 4, 1e-9)
    places = [
        end
        for end in range(shortest, len(tokens))
        if tokens[end - shortest : end] == tokens[len(tokens) - shortest :]
    ]
    assert bool(draft) == bool(places)
    assert not draft or any(((tokens[end:] + draft)[: len(draft)] == draft) for end in places)


def test_long_prompts_are_indexed_in_parts():
    one, tokens = drafter(), [1, 2, *range(3000), 1, 2]
    drafts = [one.draft(tokens, 0, 2, 1e-9)[0] for _ in range(4)]
    # the second place of both tokens is in the range
    assert drafts == [[], [], [3, 4], [3, 4]]


def mostly_periodic(token_ids, sample):
    """Return a token that is often the one three before; it depends on all tokens."""
    token = generation_next(token_ids, sample)
    return token_ids[-3] if token % 3 and len(token_ids) > 3 else token


generation_next = generation.next_token


@pytest.fixture
def periodic(monkeypatch):
    monkeypatch.setattr(generation, "next_token", mostly_periodic)


@pytest.mark.usefixtures("periodic")
@pytest.mark.parametrize("policy", ["reserve", "optimistic"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(
    "mode",
    [{"slots": 1}, {"slots": 2}, {"stages": 2}, {"stages": 3}],
    ids=["one by one", "ahead", "two stages", "three stages"],
)
@pytest.mark.parametrize("limits", [LIMITS, OF_MODEL], ids=["lookup", "model"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
def test_streams_with_drafts_have_the_answers_without(policy, prefix_cache, mode, limits, seed):
    if limits is OF_MODEL and ("stages" in mode or seed):
        # one process has a draft model
        return
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.randint(16, 20),
        policy=policy,
        prefix_cache=prefix_cache,
        step_tokens=rng.randint(9, 24),
        latency=rng.choice([0.0, 6.0]),
        running=6,
        short_slots=rng.randint(0, 2),
        short_tokens=14,
        speculation=limits,
        **mode,
    )
    bench.executor.is_wrong = lambda: rng.random() < 0.2
    bench.executor.seconds = lambda step: 1.0 + 0.1 * step.shape.tokens
    asked = []
    for _ in range(60):
        prompt, options = random_request(rng)
        try:
            reply = bench.submit(prompt, **options, streams=rng.random() < 0.5)
        except RequestError:
            # more blocks than there are
            continue
        asked.append((reply, expected_of([prompt], **options)))
        for _ in range(rng.choice([0, 1, 4])):
            bench.step()
    bench.run_all()

    assert [list(map(tokens_of(r).get, range(len(e)))) for r, e in asked] == [e for _, e in asked]
    counts = bench.scheduler.snapshot()
    rows = sum(len(drafted_rows(step)) for step in bench.executor.steps)
    assert 0 < counts.accepted_tokens < counts.drafted_tokens <= rows
    bench.check_idle()


def seconds_of(speculation, *, row, idle, rate, monkeypatch, model=0.0, requests=4):
    """Return the seconds of a stream on a virtual clock, and the saved seconds.

    Args:
        row: seconds of a row of logits; a token of a prompt takes a hundredth of a step, and a step one second.
        idle: seconds of the host's part, which only a step that is followed ahead of its end hides.
        rate: part of the tokens that are the one three before, or that a draft model guesses.
        model: seconds of a pass of a draft model.
    """

    def next_token(token_ids, sample):
        token = 1 + generation_next(token_ids, sample) % (generation.VOCABULARY - 1)
        repeats = generation_next([*token_ids, token], sample) < rate * generation.VOCABULARY
        return token_ids[-3] if repeats else token

    def seconds(step):
        lengths = [len(chunk.token_ids) for chunk in step.chunks]
        rows = lengths.count(1)
        drafted = Counter(chunk.sequence for chunk in drafted_rows(step))
        passes = max(drafted.values(), default=0)
        return 1.0 + row * rows + 0.01 * (sum(lengths) - rows) + model * passes

    monkeypatch.setattr(generation, "next_token", next_token)
    bench = Bench(num_blocks=200, step_tokens=64, slots=2, speculation=speculation)
    bench.executor.seconds, bench.executor.idle = seconds, idle
    rng = random.Random(0)
    bench.executor.is_wrong = lambda: rng.random() >= rate
    for length in (40, 50, 60, 70)[:requests]:
        bench.submit([rng.randint(1, 9) for _ in range(20)], max_tokens=length)
    bench.run_all()
    taken = sum(seconds(step) + idle * (step.after is None) for step in bench.executor.steps)
    return taken, bench.scheduler.snapshot().saved_seconds


@pytest.mark.parametrize(
    ("row", "idle", "rate", "most"),
    [
        (0.03, 0.0, 1.0, 0.55),
        (0.25, 0.0, 0.75, 1.06),
        (0.5, 0.0, 0.75, 1.06),
        (0.1, 0.5, 0.75, 1.06),
        (0.5, 0.5, 1.0, 1.06),
    ],
)
def test_drafts_never_cost_more_than_they_save(row, idle, rate, most, monkeypatch):
    figures = {"row": row, "idle": idle, "rate": rate, "monkeypatch": monkeypatch}
    (without, _), (with_drafts, _) = (seconds_of(each, **figures) for each in (None, LIMITS))
    assert with_drafts < most * without


@pytest.mark.parametrize(
    ("requests", "model", "rate", "most"),
    [(1, 0.1, 0.9, 0.55), (4, 0.1, 0.9, 0.8), (1, 0.1, 0.2, 1.06), (4, 0.7, 0.5, 1.06)],
)
def test_drafts_of_a_model_never_cost_more_than_they_save(requests, model, rate, most, monkeypatch):
    figures = {"row": 0.03, "idle": 0.0, "rate": rate, "model": model, "requests": requests}
    (without, _), (with_drafts, _) = (
        seconds_of(each, **figures, monkeypatch=monkeypatch) for each in (None, OF_MODEL)
    )
    assert with_drafts < most * without


@pytest.mark.parametrize("limits, model", [(LIMITS, 0.0), (OF_MODEL, 0.1)], ids=["ngram", "model"])
@pytest.mark.parametrize("rate", [0.2, 0.75, 1.0])
def test_a_lone_stream_takes_less_time_by_the_saved_seconds(limits, model, rate, monkeypatch):
    figures = {"row": 0.03, "idle": 0.0, "rate": rate, "model": model, "requests": 1}

    (without, none), (with_drafts, saved) = (
        seconds_of(each, **figures, monkeypatch=monkeypatch) for each in (None, limits)
    )

    assert none == 0
    # the last step, which no other one follows, is not counted
    assert saved == pytest.approx(without - with_drafts, abs=limits.num_tokens)


def test_a_pass_of_a_model_is_shared_by_the_sequences_that_draft():
    cost = DraftCost()
    for _ in range(3):
        cost.learn(4, 0, 1.0)
    for sequences in (1, 4) * 12:
        cost.learn(sequences, 2 * sequences, 1.0 + 2 * (0.3 + 0.1 * sequences), 2)
    assert cost.row_seconds(0.01, 1) == pytest.approx(0.4, rel=0.1)
    assert cost.row_seconds(0.01, 4) == pytest.approx(0.175, rel=0.1)
    for _ in range(5000):
        cost.learn(4, 0, 1.0)
    assert cost.row_seconds(0.01, 1) == pytest.approx(0.0, abs=0.01)


def test_a_model_drafts_as_often_as_its_guesses_are_right_and_is_tried_again():
    one = OF_MODEL.new_drafter()
    tokens, expected = one.draft([1], 1, 3, 0.2)
    assert (tokens, expected) == ([UNKNOWN_GUESS] * 3, 0.75)
    for _ in range(20):
        one.learn(4, 4)
    assert len(one.draft([1], 0, 3, 0.5)[0]) == 3
    for _ in range(40):
        one.learn(3, 0)
    assert one.draft([1], 0, 3, 0.2) == ([], 0.0)
    drafts = [one.draft([1], 0, 3, 0.2)[0] for _ in range(200)]
    assert drafts[-1]


def test_a_row_of_drafts_costs_what_steps_with_drafts_took_beyond_others():
    cost = DraftCost()
    assert cost.step_seconds(4) == 0.0
    assert cost.row_seconds(0.01) == pytest.approx(0.01)
    for _ in range(3):
        cost.learn(4, 0, 1.0)
    assert cost.step_seconds(4) == pytest.approx(1.0)
    for _ in range(31):
        cost.learn(4, 2, 1.5)
    assert cost.row_seconds(0.01) == pytest.approx(0.25, rel=0.15)
    # then a step without drafts is measured
    cost.learn(4, 2, 1.5)
    assert cost.step_seconds(4) == 0.0
    for _ in range(5000):
        cost.learn(4, 0, 1.0)
    assert cost.step_seconds(4) == pytest.approx(1.0)
    assert cost.row_seconds(0.01) == pytest.approx(0.01, rel=0.1)
