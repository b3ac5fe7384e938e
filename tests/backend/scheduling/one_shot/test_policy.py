"""Batches that are filled up to their limits."""

from hypothesis import given
from hypothesis import strategies as st

from tests.backend.scheduling.one_shot.waiting import cost_table, lengths_of, state_of
from varlen.costs.model import BatchLimits
from varlen.scheduling.one_shot.partition import FullBatches
from varlen.scheduling.one_shot.queue import RequestQueue

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
# nothing refines them
COSTS = {execution: cost_table(execution=execution) for execution in ("packed", "padded")}
EXECUTIONS = st.sampled_from(sorted(COSTS))


@given(LENGTHS, st.integers(1, 8), st.integers(60, 200), EXECUTIONS)
def test_full_batches_are_filled_one_after_the_other(lengths, max_sequences, max_tokens, execution):
    limits = BatchLimits(max_sequences, max_tokens, execution)
    policy, queue = FullBatches(limits, COSTS[execution]), RequestQueue()
    for length in lengths:
        queue.add(state_of(length))

    batches = []
    while len(queue):
        batch = policy.choose(queue, 1.0)
        queue.remove(batch.sequences)
        batches.append(lengths_of(batch))

    assert [length for batch in batches for length in batch] == lengths
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert limits.allow(len(batch), sum(batch), max(batch))
        if following:
            more = [*batch, following[0]]
            assert not limits.allow(len(more), sum(more), max(more))
