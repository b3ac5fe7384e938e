"""Steps arrive at a worker as they were sent."""

from multiprocessing.connection import Pipe

import numpy as np
import pytest

from varlen.costs.batch_shape import BatchShape
from varlen.execution.step_packing import pack_step
from varlen.execution.workers.step_messages import (
    answers_of,
    chosen_of,
    receive_step,
    step_message,
)
from varlen.scheduling.batch import Batch, Chunk
from varlen.scheduling.choices import (
    DeviceChoice,
    DeviceChosen,
    Draws,
    Edits,
    SearchChoices,
    SearchRules,
)

from ..test_step_packing import sequence_of_source

BLOCK_SIZE = 4


def chunk_of(length, *, has_source):
    """Return a chunk of this length, whose source text has five tokens."""
    sequence = sequence_of_source(5 if has_source else 0)
    tokens, blocks = tuple(range(length)), tuple(range(-(-length // BLOCK_SIZE)))
    if not has_source:
        return Chunk(sequence, 0, tokens, blocks, (sequence,))
    return Chunk(sequence, 0, tokens, blocks, (sequence,), (7, 8), (1, 2, 3, 4, 5))


def beams_of(search, *, has_source, num_beams=2):
    """Return a chunk of the beams of a search."""
    chunk = chunk_of(1, has_source=has_source)
    tokens, blocks = (0,) * num_beams, tuple(range(num_beams))
    places = tuple(range(search, search + num_beams))
    return chunk._replace(token_ids=tokens, block_ids=blocks, beam_places=places, beams=num_beams)


RULES = SearchRules(2, False, True, 5, (3, 4), np.array([7, 8, 9], np.int32), 1.5, 2.0)
LIMITS = [(0.7, 3, 0.9, 0.1), (0.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0)]
EDITS = Edits(
    np.array([[0, 3, 1, 2, -1, -1], [2, 1, 0, 0, 0, 2]], np.int32),
    np.array([[1.5, 0.1, -0.2], [1.0, 0.0, 0.0]], np.float32),
    np.array([7, 8], np.int32),
    np.array([-1, 3], np.int32),
    np.array([-np.inf, -0.0], np.float32),
)
NOTHING_BEGINS = EDITS._replace(**dict.fromkeys(("tokens", "counts", "biases"), np.empty(0)))
CHOICES = {
    "chosen by the engine": DeviceChoice(),
    "greedy": DeviceChoice(Draws(LIMITS, None)),
    "drawn": DeviceChoice(Draws(LIMITS, np.array([0.1, 0.5, 1 - 2**-53]))),
    "edited": DeviceChoice(Draws(LIMITS, np.array([0.1, 0.5, 0.2]), EDITS)),
    "edited as before": DeviceChoice(Draws(LIMITS, None, NOTHING_BEGINS)),
    "no tokens": DeviceChoice(Draws([], None)),
    "searched": DeviceChoice(searches=[RULES, None], renormalizes=True),
}


@pytest.mark.parametrize("has_source", [False, True], ids=["decoder", "translation"])
@pytest.mark.parametrize("copies", [(), ((1, 2), (3, 4))], ids=["no copies", "copies"])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize(("number", "after"), [(0, None), (7, 6)], ids=["first", "ahead"])
def test_a_step_arrives_with_all_its_arrays(has_source, copies, choice, number, after):
    ours, theirs = Pipe()
    chunks = [chunk_of(length, has_source=has_source) for length in (1, 1, 9)]
    if after is not None:
        chunks[1] = chunks[1]._replace(follows=3)
    if choice.searches:
        chunks[:0] = [beams_of(search, has_source=has_source) for search in (4, 2)]
    sequences, shape = tuple(chunk.sequence for chunk in chunks), BatchShape.of([1, 1, 9])
    batch = Batch(sequences, shape, 1.0, "", tuple(chunks), copies, number, after)
    step = pack_step(batch, BLOCK_SIZE, choice)
    assert bool(step.sources) == has_source

    ours.send_bytes(step_message(step))
    received = receive_step(theirs)

    np.testing.assert_array_equal(received.copies, step.copies)
    assert (received.number, received.after) == (number, after)
    assert received.follows.tolist() == (
        [[], []] if after is None else [[5 if choice.searches else 1], [3]]
    )
    assert bool(step.beams) == bool(step.searches) == bool(choice.searches)
    pairs = (
        (step.sources, received.sources),
        (step.inputs, received.inputs),
        (step.edits, received.edits),
        (step.draws, received.draws),
        (step.beams, received.beams),
        (step.searches, received.searches),
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
    step = pack_step(Batch(sequences, shape, 1.0, "", tuple(chunks)), BLOCK_SIZE)
    known = int(step.inputs["token_ids"][1])

    step.take_tokens(np.array([10, 11, 12]))

    assert step.inputs["token_ids"].tolist() == [12, known, 10, 11]


def test_what_was_chosen_comes_back_with_all_its_bits():
    ends = np.array([[0, 2], [1, 1]], np.int32)
    beams = np.array([[1, 7, -1, 2**30, 3]] * 4, np.int32)
    scores = np.array([-0.5, -np.inf, -1e-30, 0.0], np.float32)

    found = chosen_of(answers_of(DeviceChosen([2**31 - 1, 0], SearchChoices(ends, beams, scores))))

    assert found.token_ids == [2**31 - 1, 0]
    for got, sent in zip(found.searches, (ends, beams, scores), strict=True):
        np.testing.assert_array_equal(got, sent)
    assert chosen_of(answers_of(DeviceChosen([5]))) == DeviceChosen([5])


def test_a_check_arrives_as_one():
    ours, theirs = Pipe()

    ours.send_bytes(step_message(None))

    assert receive_step(theirs) is None
