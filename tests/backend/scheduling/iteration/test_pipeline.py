"""A pipeline of stages: steps in flight, their sequences, blocks and failures."""

import pytest

from tests.backend.fakes.engine_parts import FakeReply
from tests.backend.scheduling.iteration.generation import Bench, answer, search_answers, tokens_of
from tests.backend.scheduling.iteration.test_iteration import prompt_of
from varlen.errors import EngineError, RequestCancelled
from varlen.request.generation import GenerationOptions

_both_policies = pytest.mark.parametrize("policy", ["reserve", "optimistic"])
_stages = pytest.mark.parametrize("stages", [2, 3])


def start_all(bench, requests, **options):
    """Start requests, each in a step of its own; return the replies."""
    replies = []
    for seed in range(requests):
        replies.append(bench.submit(prompt_of(4, seed), **options))
        bench.engine.step()
    return replies


def in_flight(bench):
    """Return the numbers of the sequences of each step in flight."""
    steps = [batch for batch, *_ in bench.executor.in_flight]
    return [[bench.sequences.index(sequence) for sequence in step.sequences] for step in steps]


def test_equal_sequences_are_divided_equally_and_stay_so():
    bench = Bench(stages=2, running=16, step_tokens=32, num_blocks=200)
    replies = [bench.submit(prompt_of(2, seed), max_tokens=20) for seed in range(16)]

    steps = bench.run_all()

    assert [len(step.chunks) for step in steps] == [8] * 40
    for seed, reply in enumerate(replies):
        assert tokens_of(reply) == {0: answer(prompt_of(2, seed), 20)}


def test_sequences_that_remain_are_divided_again():
    bench = Bench(stages=2, running=8, step_tokens=32, num_blocks=200)
    # the first step has those that end soon
    for seed in range(8):
        bench.submit(prompt_of(2, seed), max_tokens=4 if seed < 4 else 12)

    steps = bench.run_all()

    assert [len(step.chunks) for step in steps] == [4] * 8 + [2] * 16


@_stages
def test_as_many_steps_as_stages_are_in_flight_and_each_sequence_is_in_one(stages):
    bench = Bench(stages=stages)
    for seed in range(7):
        bench.submit(prompt_of(2, seed), max_tokens=9)

    bench.engine.step()

    steps = in_flight(bench)
    assert len(steps) == stages
    # in order
    assert [number for step in steps for number in step] == list(range(7))
    assert bench.scheduler.wake_at(bench.clock()) is None


def test_a_sequence_alone_has_one_step_in_flight():
    bench = Bench(stages=3)
    reply = bench.submit(prompt_of(40), max_tokens=5)

    bench.engine.step()

    assert in_flight(bench) == [[0]]
    bench.run_all()
    assert tokens_of(reply) == {0: answer(prompt_of(40), 5)}


@_both_policies
@_stages
def test_beams_are_in_one_step_and_samples_part(policy, stages):
    bench = Bench(stages=stages, policy=policy)
    prompt = prompt_of(5)
    options = {"max_tokens": 8, "num_beams": 4, "n": 2}

    search = bench.submit(prompt, **options)
    samples = bench.submit(prompt, max_tokens=8, n=4)
    steps = bench.run_all()

    expected = search_answers(prompt, [], GenerationOptions(**options))
    assert tokens_of(search) == dict(enumerate(expected))
    assert tokens_of(samples) == {row: answer(prompt, 8, row) for row in range(4)}
    beams = [chunk.beams for step in steps for chunk in step.chunks if chunk.beams]
    assert set(beams) == {4}
    parts = [[chunk.sequence.sample for chunk in step.chunks if not chunk.beams] for step in steps]
    assert max(map(len, parts)) < 4
    bench.check_idle()


@_stages
def test_a_step_that_fails_ends_its_requests_and_no_others(stages):
    bench = Bench(stages=stages)
    bench.executor.failures = [None, "batch"]
    replies = start_all(bench, stages, max_tokens=9)

    steps = bench.run_all()

    assert isinstance(replies[1].end, EngineError)
    for seed in {*range(stages)} - {1}:
        assert tokens_of(replies[seed]) == {0: answer(prompt_of(4, seed), 9)}
        assert sum(bench.sequences[seed] in step.sequences for step in steps) == 9
    bench.check_idle()


@_stages
def test_a_step_without_memory_runs_again_and_no_other_does(stages):
    bench = Bench(stages=stages)
    bench.executor.failures = [None, "memory"]
    replies = start_all(bench, stages, max_tokens=9)

    steps = bench.run_all()

    for seed, reply in enumerate(replies):
        assert tokens_of(reply) == {0: answer(prompt_of(4, seed), 9)}
        runs = [step for step in steps if bench.sequences[seed] in step.sequences]
        # the prompt runs in two parts after its failure
        assert len(runs) == (11 if seed == 1 else 9)
    bench.check_idle()


@_both_policies
@_stages
@pytest.mark.parametrize("failure", ["memory", "memory late"])
def test_only_the_copies_of_a_step_that_failed_are_made_again(policy, stages, failure):
    prompt = prompt_of(6)
    # in each step two of the samples, which copy the last block of their prompt
    for failed_step in range(1, stages + 1):
        bench = Bench(stages=stages, policy=policy)
        reply = bench.submit(prompt, max_tokens=9, n=2 * stages)
        bench.executor.failures = [None] * failed_step + [failure]

        steps = bench.run_all()

        assert tokens_of(reply) == {row: answer(prompt, 9, row) for row in range(2 * stages)}
        # the last sample keeps the original
        copies = [copy for step in steps for copy in step.copies]
        assert len(set(copies)) == 2 * stages - 1 < len(copies)
        bench.check_idle()


@_both_policies
@_stages
def test_all_steps_in_flight_run_again_after_the_end_of_a_worker(policy, stages):
    bench = Bench(stages=stages, policy=policy)
    bench.executor.failures = [None] * stages + ["worker"]
    replies = start_all(bench, stages, max_tokens=9)

    bench.run_all()

    for seed, reply in enumerate(replies):
        assert tokens_of(reply) == {0: answer(prompt_of(4, seed), 9)}
    # each of them was in flight once, in steps that all came back as failed
    assert {sequence.request.crashes for sequence in bench.sequences} == {1}
    bench.check_idle()


@_stages
def test_requests_that_were_in_flight_at_the_end_of_two_workers_fail_and_later_ones_go_on(stages):
    bench = Bench(stages=stages)
    bench.executor.failures = ["worker"]
    present = start_all(bench, stages, max_tokens=20)
    for _ in range(stages):
        bench.step()
    assert [reply.end for reply in present] == [None] * stages

    later = bench.submit(prompt_of(6), max_tokens=20)
    bench.executor.failures = ["worker"]
    bench.run_all()

    # whichever stage ended, the steps in all of them may be the reason
    assert all("worker processes ended" in str(reply.end) for reply in present)
    assert tokens_of(later) == {0: answer(prompt_of(6), 20)}
    bench.check_idle()


@_both_policies
def test_blocks_of_a_cancelled_request_are_free_while_its_step_is_in_flight(policy):
    # one request needs all blocks but one
    bench = Bench(stages=2, policy=policy, num_blocks=5, block_size=4)
    gone = bench.submit(prompt_of(13), max_tokens=4, reply=FakeReply())
    bench.engine.step()
    bench.scheduler.remove(gone_request := bench.sequences[0].request)
    gone.fail(RequestCancelled("cancelled"))
    bench.engine._forget(gone_request)

    after = bench.submit(prompt_of(13, 2), max_tokens=4)
    bench.engine.step()

    # a later step uses them
    assert len(bench.executor.in_flight) == 2
    first, second = (batch.chunks[0].block_ids for batch, *_ in bench.executor.in_flight)
    assert set(first) & set(second)
    bench.run_all()
    assert tokens_of(after) == {0: answer(prompt_of(13, 2), 4)}
    bench.check_idle()


def test_a_group_in_flight_is_not_preempted_until_its_step_ends():
    bench = Bench(stages=2, policy="optimistic", num_blocks=4, block_size=4)
    older, younger = start_all(bench, 2, max_tokens=12)

    bench.run_all()

    assert bench.scheduler.snapshot().memory_preemptions > 0
    assert tokens_of(older) == {0: answer(prompt_of(4, 0), 12)}
    assert tokens_of(younger) == {0: answer(prompt_of(4, 1), 12)}
    bench.check_idle()


def test_prompts_in_other_steps_leave_streams_their_latency():
    bench = Bench(stages=2, step_tokens=64, latency=12.0, num_blocks=600, longest=2000)
    bench.executor.seconds = lambda step: 1.0 + 0.5 * step.shape.tokens
    stream = bench.submit(prompt_of(4), max_tokens=30, streams=True)
    for _ in range(3):
        bench.step()
    # steps of several sizes are known
    for tokens in range(2, 40):
        bench.scheduler._cost.learn(tokens, 1.0 + 0.5 * tokens)

    bench.submit(prompt_of(400), max_tokens=2)
    steps = [bench.step() for _ in range(20)]

    # two steps pass between two tokens of the stream, so each has half of the seconds
    beside = [step for step in steps if bench.sequences[1] in step.sequences]
    assert {step.shape.tokens for step in beside} == {10}
    assert stream.end is None


def test_the_forecast_divides_the_constant_part_of_a_step_among_its_share_of_sequences():
    forecasts = []
    for options in ({"running": 8, "stages": 2}, {"running": 4}):
        bench = Bench(**options)
        for tokens in range(2, 20):
            bench.scheduler._cost.learn(tokens, 1.0 + 0.5 * tokens)
        bench.submit(prompt_of(4))
        bench.engine._drain_inbox()
        forecasts.append(bench.sequences[0].request.forecast)

    assert forecasts[0] == forecasts[1]


def test_a_step_that_could_not_be_started_beside_others_leaves_nothing_behind(monkeypatch):
    bench = Bench(stages=3)
    replies = start_all(bench, 2)

    def fail(*_):
        raise RuntimeError

    replies.append(bench.submit(prompt_of(4)))
    with monkeypatch.context() as patch:
        patch.setattr(bench.executor, "start", fail)
        with pytest.raises(RuntimeError):
            bench.engine.step()
    bench.engine._fail_all(EngineError("the engine failed"))

    # the results of those in flight come after it, and after new ones have started
    later = bench.submit(prompt_of(6), max_tokens=8)
    bench.run_all()
    assert all(isinstance(reply.end, EngineError) for reply in replies)
    assert tokens_of(later) == {0: answer(prompt_of(6), 8)}
    bench.check_idle()
