"""Tokens that cannot be chosen yet: their step is repeated, and changes nothing else."""

import random

import pytest

from tests.backend.scheduling.iteration.generation import Bench, answer, tokens_of
from tests.backend.scheduling.iteration.test_iteration import prompt_of


def test_a_pending_token_is_computed_again_and_the_others_go_on():
    bench = Bench()
    slow, quick = (bench.submit(prompt_of(5, seed), max_tokens=8) for seed in (1, 2))
    of_slow = prompt_of(5, 1)
    waits = iter([True, False, True, True])
    bench.executor.is_pending = lambda sequence: (
        sequence.prompt.token_ids.tolist() == of_slow and next(waits, False)
    )

    steps = bench.run_all()

    assert tokens_of(slow) == {0: answer(of_slow, 8)}
    assert tokens_of(quick) == {0: answer(prompt_of(5, 2), 8)}
    # three steps more than the eight tokens need; the other request is gone in the last ones
    assert len(steps) == 8 + 3
    assert [len(step.chunks) for step in steps] == [2] * 8 + [1] * 3
    bench.check_idle()


@pytest.mark.parametrize("policy", ["reserve", "optimistic"])
@pytest.mark.parametrize("seed", range(20))
def test_pending_tokens_change_no_answer(policy, seed):
    rng = random.Random(seed)
    bench = Bench(policy=policy)
    bench.executor.is_pending = lambda _: rng.random() < 0.4
    # lengths around the size of a block, and equal prompts, which share blocks
    asked = [
        (prompt_of(rng.choice([1, 15, 16, 17, 32, 40]), rng.randrange(3)), rng.choice([1, 3]))
        for _ in range(6)
    ]

    replies = [bench.submit(prompt, max_tokens=20, n=n) for prompt, n in asked]
    bench.run_all()

    for reply, (prompt, n) in zip(replies, asked, strict=True):
        assert tokens_of(reply) == {row: answer(prompt, 20, row) for row in range(n)}
    bench.check_idle()


def test_the_last_block_of_a_prompt_is_not_shared_while_its_token_is_pending():
    bench = Bench()
    prompt = prompt_of(bench.pool.block_size)
    bench.executor.is_pending = lambda _: (
        not bench.pool.find_prefix([*prompt, 1]) and (len(bench.executor.steps) < 3)
    )

    reply = bench.submit(prompt, max_tokens=4)
    bench.run_all()

    assert len(bench.executor.steps) == 2 + 4
    assert tokens_of(reply) == {0: answer(prompt, 4)}
    bench.check_idle()
