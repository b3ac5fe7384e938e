"""The largest step after a step that ran out of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.scheduling.iteration.step_size import StepSize


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_a_step_that_ran_out_of_memory_is_halved_and_steps_grow_back_to_the_limit(limit, failed):
    size = StepSize(limit)
    assert (size.tokens, size.is_reduced) == (limit, False)

    size.reduce(min(failed, limit))
    assert 1 <= size.tokens <= max(1, min(failed, limit) // 2)
    for _ in range(64):
        before = size.tokens
        size.grow()
        assert before < size.tokens <= limit or before == limit

    assert (size.tokens, size.is_reduced) == (limit, False)


@pytest.mark.parametrize("limit, grown", [(320, 170), (16, 9)])
def test_steps_grow_by_a_part_of_the_limit_or_one_token(limit, grown):
    size = StepSize(limit)
    size.reduce(limit)

    size.grow()

    assert size.tokens == grown
    assert size.is_reduced
