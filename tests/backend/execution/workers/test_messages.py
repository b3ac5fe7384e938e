"""Batches, steps and answers arrive as they were sent."""

from array import array
from multiprocessing.connection import Pipe

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.costs.model import BatchShape
from varlen.execution.packing import pack_step
from varlen.execution.workers.messages import (
    Answers,
    batch_message,
    batch_of,
    receive_answers,
    send_answers,
    step_message,
    step_of,
)
from varlen.memory.memory_use import MemoryUse
from varlen.request.request import Masks, Payload, Prompt, RequestOptions, Spans, Unpooled, Vectors
from varlen.scheduling.batch import Batch, Chunk
from varlen.scheduling.device_plan import DevicePlan, Draws, Edits, SearchRules

from ..test_step_packing import sequence_of_source

PLACES = st.lists(st.integers(0, 9), max_size=3).map(lambda each: np.array(each, np.int32))
PAYLOADS = st.tuples(st.none() | PLACES, st.none() | st.integers(0, 9))
KINDS = st.sampled_from([Payload, Masks, Vectors, Unpooled, Spans])
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)
USE = MemoryUse(1, 2, 3, 4, 0.5, 6, 7)


@given(
    rows=st.lists(
        st.tuples(IDS, st.booleans(), st.booleans(), KINDS, PAYLOADS), min_size=1, max_size=5
    ),
)
@settings(max_examples=50)
def test_a_batch_arrives_with_its_ids_types_and_options(rows):
    prompts = [
        Prompt(
            np.array(ids, dtype=np.int32),
            np.arange(len(ids), dtype=np.int32) if has_types else None,
            kind(*payload),
        )
        for ids, has_types, _, kind, payload in rows
    ]
    sent_options = [RequestOptions(normalize=each) for _, _, each, *_ in rows]

    received, options = batch_of(batch_message(prompts, sent_options))

    assert [each.normalize for each in options] == [each for _, _, each, *_ in rows]
    for sent, got in zip(prompts, received, strict=True):
        np.testing.assert_array_equal(sent.token_ids, got.token_ids)
        if sent.type_ids is not None:
            np.testing.assert_array_equal(sent.type_ids, got.type_ids)
        else:
            assert got.type_ids is None or not got.type_ids.any()
        assert type(got.payload) is type(sent.payload)
        assert got.payload.count == sent.payload.count
        # None is not the same as no tokens
        assert (got.payload.tokens is None) == (sent.payload.tokens is None)
        if sent.payload.tokens is not None:
            np.testing.assert_array_equal(got.payload.tokens, sent.payload.tokens)
        assert got.num_masks == sent.num_masks
        assert got.num_vectors == sent.num_vectors


@pytest.mark.parametrize(
    "shapes", [[(3,)], [(4,), (4,), (4,)], [(2, 3), (1, 3), (5, 3)]], ids=["one", "rows", "tokens"]
)
def test_answers_arrive_in_their_shapes_and_may_be_written_to(shapes):
    ours, theirs = Pipe()
    numbers = np.random.default_rng(0)
    rows = [numbers.standard_normal(shape).astype(np.float32) for shape in shapes]
    send_answers(theirs, Answers(rows, USE))

    received = receive_answers(ours)

    assert received.use == USE
    assert received.problem is None
    for sent, got in zip(rows, received.rows, strict=True):
        np.testing.assert_array_equal(sent, got)
        assert got.flags.writeable


def test_a_problem_arrives_without_answers():
    ours, theirs = Pipe()
    send_answers(theirs, Answers((), USE, "error", "Traceback: é"))

    assert receive_answers(ours) == Answers([], USE, "error", "Traceback: é", swaps=[])


BLOCK_SIZE = 4


def chunk_of(length, *, has_source):
    """Return a chunk of this length, whose source text has five tokens."""
    sequence = sequence_of_source(5 if has_source else 0)
    tokens, blocks = tuple(range(length)), array("i", range(-(-length // BLOCK_SIZE)))
    if not has_source:
        return Chunk(sequence, 0, tokens, blocks, (sequence,))
    return Chunk(sequence, 0, tokens, blocks, (sequence,), (7, 8), (1, 2, 3, 4, 5))


def beams_of(search, *, has_source, num_beams=2):
    """Return a chunk of the beams of a search."""
    chunk = chunk_of(1, has_source=has_source)
    tokens, blocks = (0,) * num_beams, array("i", range(num_beams))
    places = tuple(range(search, search + num_beams))
    return chunk._replace(token_ids=tokens, block_ids=blocks, beam_slots=places, beams=num_beams)


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
    "chosen by the engine": DevicePlan(),
    "greedy": DevicePlan(Draws(LIMITS, None)),
    "drawn": DevicePlan(Draws(LIMITS, np.array([0.1, 0.5, 1 - 2**-53]))),
    "edited": DevicePlan(Draws(LIMITS, np.array([0.1, 0.5, 0.2]), EDITS)),
    "edited as before": DevicePlan(Draws(LIMITS, None, NOTHING_BEGINS)),
    "no tokens": DevicePlan(Draws([], None)),
    "searched": DevicePlan(searches=[RULES, None], renormalizes=True),
}


@pytest.mark.parametrize("has_source", [False, True], ids=["decoder", "translation"])
@pytest.mark.parametrize("copies", [(), ((1, 2), (3, 4))], ids=["no copies", "copies"])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize(("number", "after"), [(0, None), (7, 6)], ids=["first", "ahead"])
def test_a_step_arrives_with_all_its_arrays(has_source, copies, choice, number, after):
    chunks = [chunk_of(length, has_source=has_source) for length in (1, 1, 9)]
    if after is not None:
        chunks[1] = chunks[1]._replace(follows=3)
    if choice.searches:
        chunks[:0] = [beams_of(search, has_source=has_source) for search in (4, 2)]
    sequences, shape = tuple(chunk.sequence for chunk in chunks), BatchShape.of([1, 1, 9])
    batch = Batch(sequences, shape, 1.0, "", tuple(chunks), copies, number, after)
    step = pack_step(batch, BLOCK_SIZE, choice)
    assert bool(step.sources) == has_source

    received = step_of(step_message(step))

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
        for name, each in sent.items():
            np.testing.assert_array_equal(got[name], each)
            assert got[name].dtype == each.dtype
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
    ours, theirs = Pipe()
    token_ids = np.array([2**31 - 1, 0], np.int32)
    ends = np.array([[0, 2], [1, 1]], np.int32)
    beams = np.array([[1, 7, -1, 2**30, 3]] * 4, np.int32)
    scores = np.array([-0.5, -np.inf, -1e-30, 0.0], np.float32)
    send_answers(theirs, Answers([token_ids, ends, beams, scores], USE))

    for got, sent in zip(receive_answers(ours).rows, (token_ids, ends, beams, scores), strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype


def test_a_check_arrives_as_one():
    assert step_of(step_message(None)) is None
