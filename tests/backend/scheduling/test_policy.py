"""The token budget: order kept, budget kept, nothing lost."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.request import Request, Sequence, Ticket, Waiting
from varlen.scheduling.policy import TokenBudget, make_policy

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def queue_of(lengths):
    rows = tuple(Sequence(np.zeros(length, dtype=np.int32)) for length in lengths)
    ticket = Ticket(Request(rows), reply=None, arrival=0.0)
    return deque(Waiting(ticket, row, length) for row, length in enumerate(lengths))


def drain(policy, queue):
    batches = []
    while queue:
        batches.append([waiting.row for waiting in policy.take(queue)])
    return batches


@given(LENGTHS, st.integers(1, 100))
def test_batches_keep_the_order_and_lose_nothing(lengths, budget):
    batches = drain(TokenBudget(budget), queue_of(lengths))

    assert [row for batch in batches for row in batch] == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 100))
def test_a_batch_is_never_empty_and_only_one_sequence_may_pass_the_budget(lengths, budget):
    for batch in drain(TokenBudget(budget), queue_of(lengths)):
        assert batch
        assert len(batch) == 1 or sum(lengths[row] for row in batch) <= budget


@given(LENGTHS, st.integers(1, 100))
def test_a_batch_ends_only_where_the_next_sequence_does_not_fit(lengths, budget):
    for batch in drain(TokenBudget(budget), queue_of(lengths)):
        after = batch[-1] + 1
        if after < len(lengths):
            assert sum(lengths[row] for row in batch) + lengths[after] > budget


def test_what_does_not_run_stays_in_the_queue():
    queue = queue_of([4, 4, 4])

    taken = TokenBudget(9).take(queue)

    assert [waiting.row for waiting in taken] == [0, 1]
    assert [waiting.row for waiting in queue] == [2]


@pytest.mark.parametrize("budget, batches", [(7, [[0], [1]]), (8, [[0, 1]])])
def test_the_budget_is_inclusive(budget, batches):
    assert drain(TokenBudget(budget), queue_of([4, 4])) == batches


def test_the_configuration_sets_the_budget():
    policy = make_policy("token_budget", 8)

    assert drain(policy, queue_of([4, 4, 4])) == [[0, 1], [2]]
