"""Steps arrive at a worker as they were sent."""

from multiprocessing.connection import Pipe

import numpy as np
import pytest

from varlen.execution.step_packing import PackedStep, source_arrays, step_arrays
from varlen.execution.workers.step_messages import receive_step, send_step
from varlen.scheduling.sequence import Chunk

from ..test_step_packing import sequence_of_source

BLOCK_SIZE = 4


def chunk_of(length, *, has_source):
    """Return a chunk of this length, whose source text has five tokens."""
    sequence = sequence_of_source(5 if has_source else 0)
    tokens, blocks = tuple(range(length)), tuple(range(-(-length // BLOCK_SIZE)))
    if not has_source:
        return Chunk(sequence, 0, tokens, blocks, (sequence,))
    return Chunk(sequence, 0, tokens, blocks, (sequence,), (7, 8), (1, 2, 3, 4, 5))


@pytest.mark.parametrize("has_source", [False, True], ids=["decoder", "translation"])
@pytest.mark.parametrize("copies", [[], [(1, 2), (3, 4)]], ids=["no copies", "copies"])
def test_a_step_arrives_with_all_its_arrays(has_source, copies):
    ours, theirs = Pipe()
    chunks = [chunk_of(length, has_source=has_source) for length in (1, 1, 9)]
    step = PackedStep(
        np.array(copies, np.int64).reshape(-1, 2),
        source_arrays(chunks, BLOCK_SIZE),
        step_arrays(chunks, BLOCK_SIZE),
    )
    assert bool(step.sources) == has_source

    send_step(ours, step)
    received = receive_step(theirs)

    np.testing.assert_array_equal(received.copies, step.copies)
    for sent, got in ((step.sources, received.sources), (step.inputs, received.inputs)):
        assert sent.keys() == got.keys()
        for name, array in sent.items():
            np.testing.assert_array_equal(got[name], array)
            assert got[name].dtype == array.dtype
            # torch warns of others
            assert got[name].flags.writeable
            assert got[name].flags.aligned


def test_a_check_arrives_as_one():
    ours, theirs = Pipe()

    send_step(ours, None)

    assert receive_step(theirs) is None
