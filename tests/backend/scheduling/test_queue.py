"""The queue is always in order of what is due, and counts what it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.scheduling.queue import WaitingQueue

from .waiting import waiting


def filled(*dues):
    queue = WaitingQueue()
    for number, due in enumerate(dues, start=1):
        queue.add(waiting(number, due=due, seconds=float(number)))
    return queue


def tokens(sequences):
    return [each.num_tokens for each in sequences]


@given(st.lists(st.integers(0, 5)))
def test_what_is_due_first_stands_first_and_equals_keep_their_order(dues):
    expected = [n for _, n in sorted(zip(dues, range(1, len(dues) + 1), strict=True))]

    assert tokens(filled(*dues)) == expected


def test_first_looks_and_takes_nothing():
    queue = filled(3, 1, 2)

    assert tokens(queue.first(2)) == [2, 3]
    assert tokens(queue.first(9)) == [2, 3, 1]
    assert len(queue) == 3


@given(st.lists(st.integers(0, 5), max_size=12), st.data())
def test_remove_takes_these_and_keeps_the_order_of_all_others(dues, data):
    queue = filled(*dues)
    held = list(queue)
    batch = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []

    queue.remove(batch)

    kept = [each for each in held if each not in batch]
    assert list(queue) == kept
    assert queue.seconds == pytest.approx(sum(each.seconds for each in kept))
    assert queue.requests == len(kept)


def test_an_empty_queue_holds_no_seconds():
    queue = WaitingQueue()
    for _ in range(3):
        queue.add(waiting(1, seconds=0.1))
    queue.remove(list(queue))

    assert queue.seconds == 0.0
    queue.add(waiting(1, seconds=0.1))
    queue.clear()
    assert (len(queue), queue.seconds) == (0, 0.0)
