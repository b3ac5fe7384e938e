"""Scheduling by iteration: order, limits, blocks, and tokens that depend on none of them."""

from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backend.fakes.engine_parts import FakeReply
from tests.backend.scheduling.iteration.generation import (
    END,
    Bench,
    answer,
    search_answers,
    tokens_of,
)
from varlen.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
)
from varlen.request.generation import GenerationOptions
from varlen.scheduling.iteration import group_memory
from varlen.scheduling.iteration.group_memory import divide_step

_POLICIES = ["reserve", "optimistic"]
_both_policies = pytest.mark.parametrize("policy", _POLICIES)


def prompt_of(length, seed=0):
    """Return a prompt whose answer does not end before 30 tokens."""
    while True:
        prompt = [(seed * 7 + i * i) % 11 + 1 for i in range(length - 1)] + [seed % 100]
        if len(answer(prompt, 30)) == 30:
            return prompt
        seed += 101


def chunks_of(step):
    """Return the chunk of each prompt, as (first token, length), in order."""
    return [(chunk.start, len(chunk.token_ids)) for chunk in step.chunks]


@_both_policies
@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 100])
def test_a_prompt_of_any_length_gets_its_answer(policy, length):
    bench = Bench(policy=policy)
    prompt = prompt_of(length)

    reply = bench.submit(prompt, max_tokens=20)
    bench.run_all()

    assert reply.end == "finished"
    assert tokens_of(reply) == {0: answer(prompt, 20)}
    assert [part.finish_reason for part in reply.outputs[0]] == [None] * 19 + ["length"]
    bench.check_idle()


def test_each_step_adds_a_token_to_every_sequence_that_generates():
    bench = Bench()
    replies = [bench.submit(prompt_of(4, seed), max_tokens=6) for seed in range(4)]

    steps = bench.run_all()

    assert [len(step.chunks) for step in steps] == [4] * 6
    assert all(len(parts) == 6 for reply in replies for parts in reply.outputs.values())


def test_prompts_run_beside_sequences_that_generate_and_after_them_in_the_step():
    bench = Bench()
    bench.submit(prompt_of(4), max_tokens=20)
    bench.step()

    bench.submit(prompt_of(40))

    assert [chunks_of(bench.step()) for _ in range(4)] == [
        [(4, 1), (0, 15)],
        [(5, 1), (15, 15)],
        [(6, 1), (30, 10)],
        [(7, 1), (40, 1)],
    ]


def test_a_short_prompt_behind_a_long_one_waits_for_one_step_at_most():
    bench = Bench(step_tokens=64, longest=2000, num_blocks=600)
    bench.submit(prompt_of(1000), max_tokens=4)
    bench.step()
    bench.engine.step()

    # it arrives while a step is in flight
    short = bench.submit(prompt_of(30), max_tokens=4)
    bench.executor.complete()
    bench.step()
    bench.engine.step()

    assert len(tokens_of(short)[0]) == 1


def test_what_a_short_prompt_leaves_of_a_step_goes_to_the_long_one():
    bench = Bench(step_tokens=64)
    bench.submit(prompt_of(100), max_tokens=4)
    bench.submit(prompt_of(10), max_tokens=4)

    assert chunks_of(bench.step()) == [(0, 10), (0, 54)]


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 40))
def test_sequences_that_generate_do_not_change_how_prompts_divide_a_step(remaining, spare):
    groups = [SimpleNamespace(remaining=tokens, least_tokens=1) for tokens in remaining]
    prompts = [group for group in groups if group.remaining > 1]

    lengths = divide_step(groups, len(groups) + spare)

    assert [length for group, length in zip(groups, lengths, strict=True) if group in prompts] == (
        divide_step(prompts, len(prompts) + spare)
    )


def test_every_running_sequence_has_a_token_in_a_step_full_of_prompts():
    bench = Bench(step_tokens=5, running=8)
    for seed in range(6):
        bench.submit(prompt_of(20, seed), max_tokens=3)

    assert chunks_of(bench.step()) == [(0, 1)] * 5
    assert bench.scheduler.snapshot().waiting == 1


def order_of(bench):
    """Run all steps; return the numbers of the sequences as they start."""
    steps = bench.run_all()
    return list(dict.fromkeys(bench.sequences.index(s) for step in steps for s in step.sequences))


def test_requests_of_one_size_start_in_order_of_arrival():
    bench = Bench(running=1)
    for seed in range(5):
        bench.submit(prompt_of(3, seed), max_tokens=4)

    assert order_of(bench) == [0, 1, 2, 3, 4]


def test_a_request_of_higher_priority_passes_others_that_wait():
    bench = Bench(running=1)
    for priority in (0, 0, 0, 0, 9):
        bench.submit(prompt_of(3), max_tokens=1, priority=priority)

    assert order_of(bench) == [0, 4, 1, 2, 3]


def test_a_tenant_with_many_requests_delays_another_as_one_of_them_does():
    bench = Bench(running=1)
    for tenant in "aaaaaab":
        bench.submit(prompt_of(3), max_tokens=4, tenant=tenant)

    assert order_of(bench) == [0, 1, 6, 2, 3, 4, 5]


def test_a_shorter_prompt_that_comes_later_has_the_larger_part_of_a_step():
    bench = Bench(step_tokens=16)
    bench.submit(prompt_of(150))
    bench.step()

    bench.submit(prompt_of(50))

    assert chunks_of(bench.step()) == [(16, 1), (0, 15)]
    assert [bench.sequences.index(s) for s in bench.step().sequences] == [0, 1]


@_both_policies
@pytest.mark.parametrize("options", [{"n": 8}, {"num_beams": 8}], ids=["samples", "beams"])
def test_a_small_request_takes_a_place_of_a_large_one_that_fills_the_model(policy, options):
    bench = Bench(policy=policy, num_blocks=200)
    large = [bench.submit(prompt_of(6, seed), max_tokens=60, **options) for seed in range(4)]
    for _ in range(5):
        bench.step()

    small = bench.submit(prompt_of(4), max_tokens=3)
    for _ in range(4):
        bench.step()

    assert small.end == "finished"
    assert tokens_of(small) == {0: answer(prompt_of(4), 3)}
    bench.run_all()
    assert [reply.end for reply in large] == ["finished"] * 4
    bench.check_idle()


def test_a_small_request_takes_blocks_that_a_large_one_reserves():
    bench = Bench(num_blocks=20)
    large = bench.submit(prompt_of(6), max_tokens=75)
    bench.step()

    small = bench.submit(prompt_of(4), max_tokens=3)
    for _ in range(4):
        bench.step()

    assert small.end == "finished"
    bench.run_all()
    assert tokens_of(large) == {0: answer(prompt_of(6), 75)}
    bench.check_idle()


def test_a_small_request_takes_a_place_in_steps_that_are_full():
    bench = Bench(step_tokens=8, running=8)
    for seed in range(8):
        bench.submit(prompt_of(2, seed), max_tokens=60)
    for _ in range(16):
        bench.step()

    small = bench.submit(prompt_of(1), max_tokens=1)
    for _ in range(3):
        bench.step()

    assert small.end == "finished"
    bench.run_all()
    bench.check_idle()


@_both_policies
@pytest.mark.parametrize("failure", ["memory", "memory late"])
def test_a_copy_is_made_again_though_its_source_was_given_up(policy, failure):
    bench = Bench(policy=policy, running=2)
    prompt = prompt_of(6)
    large = bench.submit(prompt, max_tokens=60, n=2)
    bench.step()

    # it takes the place of the second sample, whose block the first one copies in this step
    small = bench.submit(prompt_of(4), max_tokens=1)
    bench.executor.failures.append(failure)
    bench.run_all()

    assert bench.scheduler.snapshot().preemptions > 0
    assert tokens_of(small) == {0: answer(prompt_of(4), 1)}
    assert tokens_of(large) == {row: answer(prompt, 60, row) for row in range(2)}
    bench.check_idle()


@_both_policies
def test_what_runs_again_for_small_requests_is_at_most_what_is_served(policy):
    bench = Bench(policy=policy, running=1, num_blocks=200)
    bench.submit(prompt_of(30), max_tokens=100)
    asked, steps = 130, 0
    while bench.step() is not None:
        steps += 1
        if steps < 300:
            bench.submit(prompt_of(2), max_tokens=1)
            asked += 3

    counts = bench.scheduler.snapshot()
    assert counts.order_preemptions > 0
    assert counts.memory_preemptions == 0
    assert counts.prefill_tokens + counts.decode_tokens <= 2 * asked
    bench.check_idle()


def test_a_request_that_does_not_fit_holds_back_those_behind_it():
    bench = Bench(num_blocks=10)
    bench.submit(prompt_of(4), max_tokens=13)
    large = bench.submit(prompt_of(20), max_tokens=9)
    small = bench.submit(prompt_of(4), max_tokens=16)

    bench.step()

    counts = bench.scheduler.snapshot()
    assert (counts.running, counts.waiting) == (1, 2)
    bench.run_all()
    assert (large.end, small.end) == ("finished", "finished")


def test_reserve_never_interrupts_a_sequence_for_memory():
    bench = Bench(num_blocks=12, policy="reserve")
    for seed in range(8):
        bench.submit(prompt_of(6, seed), max_tokens=20)

    steps = bench.run_all()

    counts = bench.scheduler.snapshot()
    assert counts.preemptions == 0
    assert counts.prefill_tokens == 8 * 6
    assert counts.decode_tokens == 8 * 19
    # 25 slots each, in blocks of 4
    assert max(len(step.sequences) for step in steps) == 1


def open_requests(bench, replies, submit):
    """Return the replies with a new request in place of each that is answered."""
    return [submit() if reply.end is not None else reply for reply in replies]


@_both_policies
@pytest.mark.parametrize(
    "large", [{"n": 8, "max_tokens": 30}, {"max_tokens": 90}], ids=["n", "long"]
)
def test_a_short_request_waits_for_one_step_whatever_large_ones_wait(policy, large):
    bench = Bench(policy=policy, num_blocks=900, short_slots=1, short_tokens=12)

    def submit_large():
        return bench.submit(prompt_of(6, len(bench.sequences)), tenant="large", **large)

    others = [submit_large() for _ in range(20)]
    for seed in range(60):
        bench.engine.step()
        # it arrives while a step is in flight
        short = bench.submit(prompt_of(4, seed), max_tokens=1)
        bench.executor.complete()
        bench.step()
        bench.engine.step()

        assert short.end == "finished"
        others = open_requests(bench, others, submit_large)
        bench.executor.complete()


@_both_policies
def test_short_requests_do_not_keep_a_large_one_from_places_and_blocks(policy):
    bench = Bench(policy=policy, num_blocks=40, block_size=4, short_slots=2, short_tokens=12)

    def submit_short():
        return bench.submit(prompt_of(6, len(bench.sequences)), max_tokens=6)

    shorts = [submit_short() for _ in range(12)]
    bench.step()
    # it needs all places, and almost all blocks
    large = bench.submit(prompt_of(8), max_tokens=12, n=8)
    for _ in range(80):
        bench.step()
        shorts = open_requests(bench, shorts, submit_short)

    assert large.end == "finished"


def test_places_for_short_sequences_are_no_more_than_a_step_has_tokens():
    bench = Bench(step_tokens=9, running=8, short_slots=4, short_tokens=12)
    for seed in range(14):
        bench.submit(prompt_of(2, seed), max_tokens=9)

    steps = bench.run_all()

    assert max(len(step.chunks) for step in steps) == 9


def test_optimistic_runs_more_sequences_and_preempts_the_last():
    bench = Bench(num_blocks=12, policy="optimistic")
    replies = [bench.submit(prompt_of(6, seed), max_tokens=20) for seed in range(8)]

    steps = bench.run_all()

    counts = bench.scheduler.snapshot()
    assert counts.memory_preemptions > 0
    assert counts.order_preemptions == 0
    assert max(len(step.sequences) for step in steps) > 2
    for seed, reply in enumerate(replies):
        assert tokens_of(reply) == {0: answer(prompt_of(6, seed), 20)}
    # the first one runs in every step until it ends
    assert all(bench.sequences[0] in step.sequences for step in steps[:20])
    bench.check_idle()


def test_optimistic_leaves_the_next_block_of_a_running_sequence_available():
    bench = Bench(num_blocks=4, policy="optimistic")
    bench.submit(prompt_of(6), max_tokens=8)
    bench.step()
    # its prompt needs two blocks, which are the last ones
    bench.submit(prompt_of(6, seed=1), max_tokens=8)

    bench.run_all()

    assert bench.scheduler.snapshot().preemptions == 0


def test_a_preempted_sequence_goes_on_before_those_that_came_after_it():
    bench = Bench(num_blocks=8, policy="optimistic", running=2)
    first, second, third = [bench.submit(prompt_of(8, s), max_tokens=18) for s in range(3)]

    steps = bench.run_all()

    assert bench.scheduler.snapshot().preemptions > 0
    ends = [max(i for i, s in enumerate(steps) if q in s.sequences) for q in bench.sequences]
    assert ends == sorted(ends)
    assert {reply.end for reply in (first, second, third)} == {"finished"}


@_both_policies
@pytest.mark.parametrize("length", [1, 7, 8, 30])
def test_samples_share_a_prompt_and_then_differ(policy, length):
    bench = Bench(policy=policy)
    prompt = prompt_of(length, seed=3)

    reply = bench.submit(prompt, prompt_of(5), max_tokens=10, n=3)
    steps = bench.run_all()

    assert tokens_of(reply) == {
        **{sample: answer(prompt, 10, sample) for sample in range(3)},
        **{3 + sample: answer(prompt_of(5), 10, sample) for sample in range(3)},
    }
    assert bench.scheduler.snapshot().prefill_tokens == length + 5
    # a full block is never written again, so it needs no copy; of another, the last sample keeps the original
    assert sum(len(step.copies) for step in steps) <= 4
    bench.check_idle()


def test_samples_reserve_the_blocks_of_their_prompt_once():
    bench = Bench(num_blocks=40, block_size=4, running=4)
    bench.submit(prompt_of(18), max_tokens=7, n=4)

    bench.step()

    # 24 slots each, 16 of them in four shared blocks
    counts = bench.pool.counts()
    assert counts.used + counts.reserved == 4 + 4 * 2


def test_samples_that_reserve_every_block_are_never_interrupted():
    bench = Bench(num_blocks=7, block_size=4)
    prompt = prompt_of(6, seed=3)

    reply = bench.submit(prompt, max_tokens=7, n=3)
    bench.run_all()

    # 12 slots each, 4 of them shared
    assert tokens_of(reply) == {sample: answer(prompt, 7, sample) for sample in range(3)}
    assert bench.scheduler.snapshot().preemptions == 0


@_both_policies
def test_samples_go_on_when_the_first_one_ends_with_its_first_token(policy):
    bench = Bench(policy=policy)
    prompt = next(p for p in map(list, product(range(1, 5), repeat=5)) if answer(p, 9) == [END])

    reply = bench.submit(prompt, max_tokens=9, n=3)
    bench.run_all()

    assert tokens_of(reply) == {sample: answer(prompt, 9, sample) for sample in range(3)}
    bench.check_idle()


def test_samples_wait_until_all_of_them_may_run():
    bench = Bench(running=4)
    bench.submit(prompt_of(4), max_tokens=6, n=2)
    bench.submit(prompt_of(4), max_tokens=6, n=3)

    bench.step()

    assert bench.scheduler.snapshot().running == 2
    assert bench.scheduler.snapshot().waiting == 3


def test_a_known_beginning_is_not_computed_again():
    bench = Bench(prefix_cache=True)
    beginning = prompt_of(12)
    bench.submit([*beginning, 1, 2], max_tokens=2)
    bench.run_all()
    before = bench.scheduler.snapshot()

    reply = bench.submit([*beginning, 3, 4, 5], max_tokens=8)
    step = bench.step()
    bench.run_all()

    assert chunks_of(step) == [(12, 3)]
    assert tokens_of(reply) == {0: answer([*beginning, 3, 4, 5], 8)}
    assert before.blocks.prefix_hit_tokens == 0
    assert bench.scheduler.snapshot().blocks.prefix_hit_tokens == 12
    bench.check_idle()


def test_a_beginning_is_known_only_to_requests_of_its_salt():
    bench = Bench(prefix_cache=True)
    beginning = prompt_of(12)
    hits = []
    for number, salt in enumerate(["", "a", "b", "a", ""]):
        reply = bench.submit([*beginning, number], max_tokens=2, cache_salt=salt)
        bench.run_all()
        assert tokens_of(reply) == {0: answer([*beginning, number], 2)}
        hits.append(bench.scheduler.snapshot().blocks.prefix_hit_tokens)

    assert hits == [0, 0, 0, 12, 24]


def test_sequences_with_a_source_share_no_beginning():
    bench = Bench(prefix_cache=True)
    # what a target stores depends on its source, or that it has none
    for source in ([5], None, [6]):
        bench.submit(prompt_of(12), max_tokens=8, source=source)
        bench.run_all()

    assert bench.scheduler.snapshot().blocks.prefix_hit_tokens == 0


def test_a_prompt_that_is_known_as_a_whole_runs_its_last_block():
    bench = Bench(prefix_cache=True)
    prompt = prompt_of(12)
    replies = []
    for _ in range(2):
        replies.append(bench.submit(prompt, max_tokens=8))
        bench.run_all()

    assert tokens_of(replies[0]) == tokens_of(replies[1])
    assert bench.scheduler.snapshot().blocks.prefix_hit_tokens == 8


def test_generated_tokens_are_a_known_beginning_too():
    bench = Bench(prefix_cache=True)
    prompt = prompt_of(6)
    bench.submit(prompt, max_tokens=11)
    bench.run_all()

    bench.submit(prompt + answer(prompt, 11), max_tokens=2)
    bench.run_all()

    # 16 tokens have keys and values, the last generated one has none
    assert bench.scheduler.snapshot().blocks.prefix_hit_tokens == 16


@pytest.mark.parametrize(
    "policy, length, options, message",
    [
        ("reserve", 60, {"max_tokens": 41}, "the prompt has 60 tokens and max_tokens is 41; this model takes at most"),
        ("reserve", 40, {"max_tokens": 42}, "need 21 KV blocks of 4 tokens; this model has 20"),
        ("reserve", 9, {"max_tokens": 32, "n": 3}, "need 26 KV blocks of 4 tokens; this model has 20"),
        ("optimistic", 40, {"max_tokens": 42}, "need 21 KV blocks of 4 tokens; this model has 20"),
        ("reserve", 4, {"n": 6}, "n is 6; this model generates at most 5 sequences at a time"),
    ],
    ids=["too long", "too many blocks", "too many samples", "optimistic", "n"],
)  # fmt: skip
def test_a_request_that_can_never_run_is_refused(policy, length, options, message):
    bench = Bench(num_blocks=20, longest=100, policy=policy, running=5)

    with pytest.raises(RequestError, match=message):
        bench.submit(prompt_of(length), **options)

    bench.check_idle()


def test_a_refusal_names_the_row():
    bench = Bench(longest=100)

    with pytest.raises(RequestError, match="row 1: the prompt has 99 tokens"):
        bench.submit(prompt_of(9), prompt_of(99))


@_both_policies
def test_a_request_that_needs_every_block_runs(policy):
    bench = Bench(num_blocks=20, longest=100, policy=policy)
    prompt = prompt_of(60)

    replies = [bench.submit(prompt, max_tokens=21), bench.submit(prompt, max_tokens=20)]
    bench.run_all()

    assert [tokens_of(reply) for reply in replies] == [
        {0: answer(prompt, 21)},
        {0: answer(prompt, 20)},
    ]


def test_optimistic_runs_samples_one_after_another_if_they_do_not_fit_together():
    bench = Bench(num_blocks=10, block_size=4, policy="optimistic")
    prompt = prompt_of(9)

    reply = bench.submit(prompt, max_tokens=32, n=3)
    bench.run_all()

    assert tokens_of(reply) == {sample: answer(prompt, 32, sample) for sample in range(3)}
    bench.check_idle()


def test_a_queue_that_is_full_refuses():
    bench = Bench(max_requests=1)
    bench.submit(prompt_of(4))
    with pytest.raises(QueueFullError):
        bench.submit(prompt_of(4))

    # a request that runs does not wait
    bench.step()
    bench.submit(prompt_of(4))


@_both_policies
def test_blocks_of_a_removed_request_are_free_at_once(policy):
    bench = Bench(policy=policy)
    gone, stays = bench.submit(prompt_of(20), n=2), bench.submit(prompt_of(5), max_tokens=20)
    bench.step()
    bench.engine.step()

    bench.scheduler.remove(bench.sequences[0].request)

    # its step still runs, but before any that uses them again
    assert bench.executor.in_flight
    assert bench.pool.counts().used == 2
    bench.executor.complete()
    bench.engine.step()
    assert bench.scheduler.snapshot().running == 1
    bench.run_all()
    assert stays.end == "finished"
    assert len(tokens_of(gone).get(0, ())) <= 1


def test_a_cancelled_request_leaves_a_step_before_it_starts():
    bench = Bench()
    gone, stays = FakeReply(), bench.submit(prompt_of(4))
    bench.submit(prompt_of(4), n=2, reply=gone)
    for _ in range(3):
        bench.step()

    gone.cancelled = True
    step = bench.step()

    assert len(step.sequences) == 1
    assert isinstance(gone.end, RequestCancelled)
    assert bench.pool.counts().used == 2
    bench.run_all()
    assert stays.end == "finished"
    bench.check_idle()


def test_requests_that_are_all_cancelled_leave_no_step():
    bench = Bench()
    reply = bench.submit(prompt_of(4), reply=FakeReply(cancelled=[True]))

    assert bench.step() is None

    assert isinstance(reply.end, RequestCancelled)
    bench.check_idle()


def test_a_deadline_ends_a_sequence_that_generates():
    bench = Bench()
    late = bench.submit(prompt_of(4), max_tokens=20, deadline=2.5)

    bench.run_all()

    assert isinstance(late.end, DeadlineError)
    assert tokens_of(late) == {0: answer(prompt_of(4), 20)[:3]}
    bench.check_idle()


def test_a_request_that_cannot_meet_its_deadline_even_alone_is_refused():
    bench = Bench()
    bench.submit(prompt_of(4), max_tokens=8)
    bench.run_all()

    # steps take a second each
    with pytest.raises(
        DeadlineError, match="expected in about 20000 ms, the deadline is in 19500 ms"
    ):
        bench.submit(prompt_of(4), max_tokens=20, deadline=19.5)
    with pytest.raises(DeadlineError):
        bench.submit(prompt_of(17), max_tokens=20, deadline=20.5)
    in_time = bench.submit(prompt_of(4), max_tokens=20, deadline=20.5)
    bench.run_all()
    assert in_time.end == "finished"


def test_a_deadline_counts_what_waits():
    bench = Bench(running=2)
    bench.submit(prompt_of(4), max_tokens=8)
    bench.run_all()
    for _ in range(4):
        bench.submit(prompt_of(4), max_tokens=20)

    with pytest.raises(DeadlineError):
        bench.submit(prompt_of(4), max_tokens=10, deadline=45)
    bench.submit(prompt_of(4), max_tokens=10, deadline=51)


def test_a_deadline_counts_only_what_the_order_puts_first():
    bench = Bench(running=1)
    bench.submit(prompt_of(4), max_tokens=8)
    bench.run_all()
    for _ in range(10):
        bench.submit(prompt_of(4), max_tokens=20)
    bench.step()

    # it takes the place of others, and the tenant has nothing that waits
    small = bench.submit(prompt_of(1), max_tokens=1, tenant="small", priority=9, deadline=30)
    bench.run_all()

    assert small.end == "finished"


def test_a_large_request_takes_the_blocks_of_several_that_are_behind_it():
    bench = Bench(policy="optimistic", running=4, num_blocks=20)
    behind = [
        bench.submit(prompt_of(6, each), max_tokens=68, tenant=str(each)) for each in range(3)
    ]
    bench.step()

    # 16 of 20 blocks, where each of the others holds two and keeps one more while it runs
    large = bench.submit(prompt_of(64), max_tokens=1, tenant="large", priority=9)
    bench.step()

    assert bench.scheduler.snapshot().order_preemptions == 2
    bench.run_all()
    assert {reply.end for reply in (large, *behind)} == {"finished"}
    bench.check_idle()


@_both_policies
def test_a_step_that_runs_out_of_memory_runs_again_in_smaller_ones(policy):
    bench = Bench(policy=policy)
    prompts = [prompt_of(10), prompt_of(3), prompt_of(12)]
    replies = [bench.submit(prompt, max_tokens=9) for prompt in prompts]
    bench.step()
    bench.executor.failures = ["memory"] * 3

    steps = bench.run_all()

    # 16 tokens at first, then half of those that failed, then more again
    sizes = [step.shape.tokens for step in steps]
    assert sizes[1] <= sizes[0] // 2
    assert sizes[2] <= max(1, sizes[1] // 2)
    assert max(sizes[3:]) > sizes[2]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert tokens_of(reply) == {0: answer(prompt, 9)}


@_both_policies
def test_copies_of_a_step_that_runs_out_of_memory_are_made_up_for(policy):
    bench = Bench(policy=policy)
    prompt = prompt_of(6, seed=3)
    reply = bench.submit(prompt, max_tokens=9, n=3)
    bench.step()
    bench.executor.failures = ["memory"]

    assert len(bench.step().copies) == 2
    bench.run_all()

    assert tokens_of(reply) == {sample: answer(prompt, 9, sample) for sample in range(3)}
    bench.check_idle()


@_both_policies
def test_a_step_whose_copies_are_released_while_it_runs_has_none_in_flight_after_it(policy):
    bench = Bench(policy=policy)
    late = bench.submit(prompt_of(6, seed=3), max_tokens=9, n=3, deadline=1.5)
    bench.step()
    bench.engine.step()
    assert bench.executor.in_flight[0][0].copies

    bench.clock.now += 1.0
    bench.run_all()

    assert isinstance(late.end, DeadlineError)
    bench.check_idle()


def test_a_token_that_does_not_fit_alone_fails():
    bench = Bench()
    reply = bench.submit(prompt_of(10))
    bench.executor.failures = ["memory"] * 5

    bench.run_all()

    assert isinstance(reply.end, EngineError)
    assert "too little memory" in str(reply.end)
    bench.check_idle()


def test_a_step_that_fails_ends_its_requests_and_no_others():
    bench = Bench(running=2)
    replies = [bench.submit(prompt_of(4), max_tokens=4) for _ in range(3)]
    bench.executor.failures = ["batch"]

    bench.run_all()

    assert [type(reply.end) for reply in replies] == [EngineError, EngineError, str]
    bench.check_idle()


def test_an_adapter_that_cannot_be_read_fails_nobody_else_if_its_client_has_left():
    bench = Bench(slots=2)
    stays = bench.submit(prompt_of(4), max_tokens=4)
    # it leaves while its first step runs
    gone = FakeReply(cancelled=[False, True])
    bench.submit(prompt_of(4), adapter="unread", reply=gone)
    bench.executor.failures = ["adapter unread"]

    bench.run_all()

    assert isinstance(gone.end, RequestCancelled)
    assert stays.end == "finished"
    assert tokens_of(stays) == {0: answer(prompt_of(4), 4)}
    bench.check_idle()


@_both_policies
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("ended_at", range(0, 12, 2))
def test_every_request_goes_on_when_a_worker_ends_in_any_step(policy, prefix_cache, ended_at):
    bench = Bench(policy=policy, prefix_cache=prefix_cache)
    prompts = [prompt_of(9), prompt_of(9), prompt_of(20, seed=2)]
    asked = [{"n": 3}, {}, {"num_beams": 3, "n": 2}]
    replies = [
        bench.submit(prompt, max_tokens=9, **options)
        for prompt, options in zip(prompts, asked, strict=True)
    ]
    bench.executor.failures = [None] * ended_at + ["worker"]

    bench.run_all()

    assert tokens_of(replies[0]) == {row: answer(prompts[0], 9, row) for row in range(3)}
    assert tokens_of(replies[1]) == {0: answer(prompts[1], 9)}
    searched = search_answers(prompts[2], [], GenerationOptions(max_tokens=9, **asked[2]))
    assert list(map(tokens_of(replies[2]).get, range(2))) == searched
    assert [reply.end for reply in replies] == ["finished"] * 3
    # none of its blocks has been found by a later one, which the bench would show
    bench.check_idle()


def test_a_request_in_the_steps_of_two_workers_that_ended_fails_and_others_go_on():
    bench = Bench()
    present = bench.submit(prompt_of(4), [2, 3], max_tokens=20)
    bench.executor.failures = [None, "worker"]
    bench.step()
    bench.step()
    later = bench.submit(prompt_of(6), max_tokens=20)
    bench.executor.failures = [None, "worker"]

    bench.run_all()

    assert isinstance(present.end, EngineError)
    assert "worker processes ended" in str(present.end)
    assert tokens_of(later) == {0: answer(prompt_of(6), 20)}
    bench.check_idle()


@pytest.mark.parametrize("slots", [1, 2])
def test_steps_that_could_not_be_started_leave_nothing_behind(slots, monkeypatch):
    bench = Bench(slots=slots)

    def fail(*_):
        raise RuntimeError

    for _ in range(3):
        reply = bench.submit(prompt_of(4))
        with monkeypatch.context() as patch:
            patch.setattr(bench.executor, "start", fail)
            with pytest.raises(RuntimeError):
                bench.engine.step()
        bench.engine._fail_all(EngineError("the engine failed"))
        assert isinstance(reply.end, EngineError)

    # what comes next has the right tokens
    later = bench.submit(prompt_of(6), max_tokens=8)
    bench.run_all()
    assert tokens_of(later) == {0: answer(prompt_of(6), 8)}
    bench.check_idle()


def test_a_step_that_the_scheduler_lost_is_forgotten_when_the_next_one_ends():
    bench = Bench(slots=2)
    lost = bench.submit(prompt_of(5), n=2, max_tokens=9)
    # scheduled, and never started
    bench.engine._drain_inbox()
    batch = bench.scheduler.schedule(bench.clock())
    bench.engine._fail_all(EngineError("the engine failed"))

    later = bench.submit(prompt_of(5, 2), max_tokens=9)
    bench.run_all()

    assert isinstance(lost.end, EngineError)
    assert tokens_of(later) == {0: answer(prompt_of(5, 2), 9)}
    bench.admission.mark_ended(batch)
    bench.check_idle()


def test_a_fault_between_the_start_of_a_group_and_its_first_step_leaves_nothing_counted(
    monkeypatch,
):
    bench = Bench()
    reply = bench.submit(prompt_of(4))

    def fail(*_):
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(group_memory, "divide_step", fail)
        with pytest.raises(RuntimeError):
            bench.engine.step()
    bench.engine._fail_all(EngineError("the engine failed"))

    assert isinstance(reply.end, EngineError)
    bench.check_idle()


class Panic(BaseException):
    """What a library in another language raises; no Exception."""


class BrokenWriter:
    def write(self, token):
        raise Panic


@pytest.mark.parametrize("fails", ["new_writer", "write"])
def test_a_writer_that_fails_ends_its_own_request_and_no_other(fails, monkeypatch):
    bench = Bench()
    good = bench.submit(prompt_of(3), max_tokens=6)
    bench.step()

    def new_writer(sequence):
        if fails == "new_writer":
            raise Panic
        return BrokenWriter()

    monkeypatch.setattr(bench.engine, "_new_writer", new_writer)
    bad = FakeReply()
    try:
        bench.submit(prompt_of(9), max_tokens=6, reply=bad)
    except EngineError as error:
        # a request that is not admitted is answered by who submits it
        assert fails == "new_writer"
        bad.fail(error)

    bench.run_all()

    assert tokens_of(good) == {0: answer(prompt_of(3), 6)}
    assert isinstance(bad.end, EngineError)
    assert bench.pool.counts().used == bench.pool.counts().reserved == 0
    assert bench.admission.depth == (0, 0)


def test_a_request_that_is_refused_gets_no_writer(monkeypatch):
    bench, made = Bench(), []
    monkeypatch.setattr(bench.engine, "_new_writer", made.append)
    bench.engine.close()

    with pytest.raises(EngineError):
        bench.submit(prompt_of(3))
    assert not made
