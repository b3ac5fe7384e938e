"""Beam searches and source texts in the scheduler: blocks, order, limits and answers."""

import math

import pytest

from tests.backend.fakes.engine_parts import FakeReply
from tests.backend.scheduling.iteration import generation
from tests.backend.scheduling.iteration.generation import Bench, answer, search_answers, tokens_of
from varlen.errors import EngineError, RequestCancelled, RequestError
from varlen.request.generation import GenerationOptions
from varlen.scheduling.device_plan import BeamStep

_both_policies = pytest.mark.parametrize("policy", ["reserve", "optimistic"])
PROMPT = [5, 1, 4, 1, 5, 9]


def steady(monkeypatch, end=None, parents=lambda row: row):
    """Let all beams go on until `max_tokens`; return the list of what steps read."""
    asked = []

    def search_step(contexts, num_generated, options):
        asked.append(contexts)
        num_beams = options.num_beams
        continued = tuple(min(parents(row), len(contexts) - 1) for row in range(num_beams))
        if num_generated + 1 < options.max_tokens:
            return BeamStep(continued, tuple(range(1, num_beams + 1)))
        return end or BeamStep((), (), ())

    monkeypatch.setattr(generation, "search_step", search_step)
    return asked


def expected(prompt, source=(), **options):
    answers = search_answers(prompt, source, GenerationOptions(**options))
    return dict(enumerate(answers))


@_both_policies
@pytest.mark.parametrize("length", [1, 4, 6, 40])
@pytest.mark.parametrize("source", [None, [7, 7, 1, 8, 2]], ids=["prompt", "source"])
def test_a_search_gets_its_answer(policy, length, source):
    bench = Bench(policy=policy)
    prompt = (PROMPT * 7)[:length]
    options = {"max_tokens": 20, "num_beams": 4, "n": 3}

    reply = bench.submit(prompt, source=source, **options)
    bench.run_all()

    assert tokens_of(reply) == expected(prompt, source or [], **options)
    assert all(len(parts) == 1 for parts in reply.outputs.values())
    bench.check_idle()


@_both_policies
@pytest.mark.parametrize("failure", [None, "worker"])
def test_a_search_with_launches_begins_with_a_row_for_each_beam(policy, failure, monkeypatch):
    steady(monkeypatch)
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", 1e6)
    bench = Bench(policy=policy, launch_steps=3)
    bench.executor.failures = [failure]
    bench.submit([5], source=PROMPT, max_tokens=3, num_beams=4)

    bench.run_all()

    first = bench.executor.steps[0].chunks[0]
    assert (first.beams, first.token_ids) == (4, (5,) * 4)
    # its source and the prompt once, and the rows of two more steps
    counts = bench.scheduler.snapshot()
    assert (counts.prefill_tokens, counts.decode_tokens) == (len(PROMPT) + 1, 2 * 4)
    bench.check_idle()


@pytest.mark.parametrize("launch_steps", [1, 3])
@pytest.mark.parametrize("blocks", [9, 10])
def test_launches_preempt_no_more_searches_than_single_steps(blocks, launch_steps, monkeypatch):
    steady(monkeypatch)
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", 1e6)
    bench = Bench(num_blocks=blocks, policy="optimistic", launch_steps=launch_steps)
    replies = [bench.submit([5], max_tokens=3, num_beams=4, source=[7]) for _ in range(2)]

    bench.run_all()

    # one for each source and each beam
    begins_with_beams = blocks == 10 and launch_steps > 1
    assert bench.executor.steps[0].chunks[0].beams == 4 * begins_with_beams
    assert bench.scheduler.snapshot().preemptions == (0 if blocks == 10 else 4)
    assert [reply.end for reply in replies] == ["finished"] * 2
    bench.check_idle()


@_both_policies
def test_a_search_that_takes_no_step_of_its_first_launch_begins_again(policy, monkeypatch):
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", 1e6)
    bench = Bench(policy=policy, launch_steps=3)
    options = {"max_tokens": 6, "num_beams": 2, "n": 2}

    # the executor chooses how many steps each search takes
    for source in [[7, 1], [7, 2], [7, 3]] * 4:
        replies = [bench.submit([5], **options, source=[*source, each]) for each in (1, 2)]
        bench.run_all()
        for each, reply in enumerate(replies, start=1):
            assert tokens_of(reply) == expected([5], [*source, each], **options)

    starts = [chunk.encodes for step in bench.executor.steps for chunk in step.chunks]
    assert len(list(filter(None, starts))) > 2 * 12
    bench.check_idle()


@_both_policies
@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"max_tokens": 9}])
def test_prompts_that_cannot_begin_with_beams_have_one_row(policy, options):
    bench = Bench(policy=policy, launch_steps=3)
    prompt = [5] if options["max_tokens"] == 1 else PROMPT
    reply = bench.submit(prompt, source=PROMPT, num_beams=4, **options)

    bench.run_all()

    assert not bench.executor.steps[0].chunks[0].beams
    assert tokens_of(reply) == expected(prompt, PROMPT, num_beams=4, **options)


def test_beams_share_the_blocks_of_their_prompt_and_each_copies_the_last_one(monkeypatch):
    steady(monkeypatch)
    bench = Bench(block_size=4)
    bench.submit(PROMPT, max_tokens=3, num_beams=4)

    assert [bench.step().chunks[0].beams for _ in range(2)] == [0, 4]

    # a full one for all, and one for each beam; the last beam writes where the prompt ends
    assert bench.pool.counts().used == 1 + 4
    # the device copies the end of the prompt
    assert not bench.executor.steps[1].copies


@_both_policies
def test_blocks_that_no_beam_reads_are_given_back_unless_they_are_reserved(policy, monkeypatch):
    steady(monkeypatch, parents=lambda row: 0)
    bench = Bench(block_size=4, policy=policy)
    bench.submit(PROMPT, max_tokens=13, num_beams=4)

    used = []
    while bench.step():
        used.append(bench.pool.counts().used)

    # the prompt has two blocks; beams write three, then four each; all continue the first one
    shared = [2, *[2 + 3] * 2, *[2 + 4] * 4, *[2 + 1 + 4] * 4]
    whole = [2, *[2 + 3] * 2, *[2 + 3 + 4] * 4, *[2 + 3 + 8] * 4]
    assert used[:11] == (whole if policy == "reserve" else shared)
    bench.check_idle()


def test_a_search_reserves_what_all_its_beams_may_need():
    bench = Bench(num_blocks=40, block_size=4)
    bench.submit([1] * 18, max_tokens=7, num_beams=4, source=[1] * 9)

    bench.step()

    # three of the source; 24 slots of each beam, 16 of them in four shared blocks
    counts = bench.pool.counts()
    assert counts.used + counts.reserved == 3 + 4 + 4 * 2


@_both_policies
def test_a_search_that_needs_every_block_runs(policy, monkeypatch):
    asked = steady(monkeypatch)
    bench = Bench(num_blocks=3 + 4 * 2, block_size=4, policy=policy)

    reply = bench.submit([5], max_tokens=8, num_beams=4, source=[1] * 9)
    bench.run_all()

    assert reply.end == "finished"
    assert len(asked) == 8
    assert bench.scheduler.snapshot().preemptions == 0


def test_a_preempted_search_starts_again_and_encodes_its_source_again(monkeypatch):
    asked = steady(monkeypatch)
    bench = Bench(num_blocks=11, policy="optimistic")
    older = bench.submit([5], max_tokens=8, num_beams=4, source=[1] * 9)
    younger = bench.submit([6], max_tokens=8, num_beams=2, source=[2] * 4)

    steps = bench.run_all()

    counts = bench.scheduler.snapshot()
    assert (older.end, younger.end) == ("finished", "finished")
    # one for each beam that it may have
    assert counts.preemptions == 2
    starts = [chunk.encodes for step in steps for chunk in step.chunks if chunk.encodes]
    assert starts == [(1,) * 9, (2,) * 4, (2,) * 4]
    assert asked.count([[~2] * 4 + [6]]) == 2
    bench.check_idle()


def test_tokens_of_sources_and_beams_are_counted():
    bench = Bench()
    bench.submit(PROMPT[:2], max_tokens=1, num_beams=2, source=[1] * 9)

    step = bench.step()
    bench.run_all()

    assert step.shape.tokens == 2 + 9
    assert bench.scheduler.snapshot().prefill_tokens == 2 + 9


def test_sources_start_together_only_if_a_step_has_place_for_both():
    bench = Bench(step_tokens=16)
    for length in (9, 5, 3):
        bench.submit([5], max_tokens=3, num_beams=2, source=[1] * length)

    # a token of each target is beside its source
    assert [chunk.encodes for chunk in bench.step().chunks] == [(1,) * 9, (1,) * 5]
    assert [len(chunk.encodes) for chunk in bench.step().chunks if chunk.encodes] == [3]


def test_a_source_as_long_as_a_step_runs_alone_once_nothing_else_does(monkeypatch):
    steady(monkeypatch)
    bench = Bench(step_tokens=16)
    bench.submit([1, 2, 3], max_tokens=4)
    large = bench.submit([5], max_tokens=2, num_beams=2, source=[1] * 16)
    behind = bench.submit([1, 2, 3], max_tokens=20)

    steps = bench.run_all()

    [start] = [step for step in steps if any(chunk.encodes for chunk in step.chunks)]
    assert len(start.chunks) == 1
    assert {large.end, behind.end} == {"finished"}
    # it held back the one behind it
    assert all(bench.sequences[2] not in step.sequences for step in steps[: steps.index(start)])


def test_a_search_waits_until_all_its_beams_may_run():
    bench = Bench(running=4)
    bench.submit(PROMPT, max_tokens=6, num_beams=2)
    bench.submit(PROMPT, max_tokens=6, num_beams=3)

    bench.step()

    counts = bench.scheduler.snapshot()
    assert (counts.running, counts.waiting) == (2, 3)


@_both_policies
@pytest.mark.parametrize("failure", ["memory", "memory late"])
def test_copies_and_sources_of_a_step_that_runs_out_of_memory_are_made_again(policy, failure):
    options = {"max_tokens": 12, "num_beams": 4, "n": 4}
    for failed_step in range(7):
        bench = Bench(policy=policy)
        reply = bench.submit(PROMPT[:1], source=PROMPT, **options)
        beside = bench.submit(PROMPT, max_tokens=9, n=3)

        bench.executor.failures = [None] * failed_step + [failure]
        bench.run_all()

        assert tokens_of(reply) == expected(PROMPT[:1], PROMPT, **options)
        assert tokens_of(beside) == {sample: answer(PROMPT, 9, sample) for sample in range(3)}
        bench.check_idle()


def test_a_search_that_finds_fewer_answers_than_asked_for_has_empty_ones(monkeypatch):
    steady(monkeypatch, end=BeamStep((), (), (generation.BeamAnswer((3, 0), -1.5, "stop"),)))
    bench = Bench()

    reply = bench.submit(PROMPT, max_tokens=2, num_beams=3, n=3)
    bench.run_all()

    assert tokens_of(reply) == {0: [3, 0], 1: [], 2: []}
    assert [part.score for [part] in reply.outputs.values()] == [-1.5, -math.inf, -math.inf]


def test_a_search_that_fails_ends_its_request_and_no_other(monkeypatch):
    steady(monkeypatch, end=BeamStep((), (), error=EngineError("it failed")))
    bench = Bench()
    beside = bench.submit(PROMPT, max_tokens=9)

    failed = bench.submit(PROMPT, max_tokens=3, num_beams=3)
    bench.run_all()

    assert str(failed.end) == "it failed"
    assert tokens_of(beside) == {0: answer(PROMPT, 9)}
    bench.check_idle()


@_both_policies
def test_a_cancelled_search_leaves_no_block(policy, monkeypatch):
    steady(monkeypatch)
    bench = Bench(policy=policy)
    gone = bench.submit([5], max_tokens=9, num_beams=4, source=PROMPT, reply=FakeReply())
    for _ in range(3):
        bench.step()

    gone.cancelled = True
    assert bench.step() is None

    assert isinstance(gone.end, RequestCancelled)
    bench.check_idle()


@pytest.mark.parametrize(
    "policy, options, message",
    [
        ("reserve", {"num_beams": 6}, "num_beams is 6; this model generates at most 5 sequences at a time"),
        ("reserve", {"num_beams": 5, "max_tokens": 17}, "21 tokens and 5 times max_tokens of 17 need 30 KV blocks"),
        ("optimistic", {"num_beams": 5, "max_tokens": 17}, "need 30 KV blocks of 4 tokens; this model has 20"),
    ],
    ids=["num_beams", "blocks", "optimistic"],
)  # fmt: skip
def test_a_search_that_can_never_run_is_refused(policy, options, message):
    bench = Bench(num_blocks=20, policy=policy, running=5)

    with pytest.raises(RequestError, match=message):
        bench.submit([5], source=[1] * 20, **options)

    bench.check_idle()
