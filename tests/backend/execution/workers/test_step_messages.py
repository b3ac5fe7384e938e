"""Steps arrive at a worker as they were sent."""

from multiprocessing.connection import Pipe

import numpy as np
import pytest

from varlen.costs.batch_shape import BatchShape
from varlen.execution.step_packing import pack_step
from varlen.execution.workers.step_messages import receive_step, step_message
from varlen.scheduling.batch import Chunk, StepBatch
from varlen.scheduling.choices import Draws

from ..test_step_packing import sequence_of_source

BLOCK_SIZE = 4


def chunk_of(length, *, has_source):
    """Return a chunk of this length, whose source text has five tokens."""
    sequence = sequence_of_source(5 if has_source else 0)
    tokens, blocks = tuple(range(length)), tuple(range(-(-length // BLOCK_SIZE)))
    if not has_source:
        return Chunk(sequence, 0, tokens, blocks, (sequence,))
    return Chunk(sequence, 0, tokens, blocks, (sequence,), (7, 8), (1, 2, 3, 4, 5))


LIMITS = [(0.7, 3, 0.9, 0.1), (0.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0)]
DRAWS = {
    "chosen by the engine": None,
    "greedy": Draws(LIMITS, None),
    "drawn": Draws(LIMITS, np.array([0.1, 0.5, 1 - 2**-53])),
    "no tokens": Draws([], None),
}


@pytest.mark.parametrize("has_source", [False, True], ids=["decoder", "translation"])
@pytest.mark.parametrize("copies", [(), ((1, 2), (3, 4))], ids=["no copies", "copies"])
@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(("number", "after"), [(0, None), (7, 6)], ids=["first", "ahead"])
def test_a_step_arrives_with_all_its_arrays(has_source, copies, draws, number, after):
    ours, theirs = Pipe()
    chunks = [chunk_of(length, has_source=has_source) for length in (1, 1, 9)]
    if after is not None:
        chunks[1] = chunks[1]._replace(follows=3)
    sequences, shape = tuple(chunk.sequence for chunk in chunks), BatchShape.of([1, 1, 9])
    batch = StepBatch(sequences, shape, 1.0, "", tuple(chunks), copies, number, after)
    step = pack_step(batch, BLOCK_SIZE, draws)
    assert bool(step.sources) == has_source

    ours.send_bytes(step_message(step))
    received = receive_step(theirs)

    np.testing.assert_array_equal(received.copies, step.copies)
    assert (received.number, received.after) == (number, after)
    assert received.follows.tolist() == ([[], []] if after is None else [[1], [3]])
    pairs = (
        (step.sources, received.sources),
        (step.inputs, received.inputs),
        (step.draws, received.draws),
    )
    for sent, got in pairs:
        assert sent.keys() == got.keys()
        for name, array in sent.items():
            np.testing.assert_array_equal(got[name], array)
            assert got[name].dtype == array.dtype
            # torch warns of others
            assert got[name].flags.writeable
            assert got[name].flags.aligned


def test_a_step_takes_the_tokens_that_the_step_before_has_chosen():
    chunks = [chunk_of(1, has_source=False) for _ in range(4)]
    chunks = [
        each._replace(follows=output) for each, output in zip(chunks, [2, None, 0, 1], strict=True)
    ]
    sequences, shape = tuple(chunk.sequence for chunk in chunks), BatchShape.of([1] * 4)
    step = pack_step(StepBatch(sequences, shape, 1.0, "", tuple(chunks)), BLOCK_SIZE)
    known = int(step.inputs["token_ids"][1])

    step.take_tokens(np.array([10, 11, 12]))

    assert step.inputs["token_ids"].tolist() == [12, known, 10, 11]


def test_a_check_arrives_as_one():
    ours, theirs = Pipe()

    ours.send_bytes(step_message(None))

    assert receive_step(theirs) is None
