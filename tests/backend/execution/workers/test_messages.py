"""Batches and answers arrive as they were sent."""

from multiprocessing.connection import Pipe

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.execution.workers.messages import (
    Answers,
    receive_answers,
    receive_batch,
    send_answers,
    send_batch,
)
from varlen.memory.memory_use import MemoryUse
from varlen.request.request import Masks, Payload, Prompt, RequestOptions, Unpooled, Vectors

PLACES = st.lists(st.integers(0, 9), max_size=3).map(lambda each: np.array(each, np.int32))
PAYLOADS = st.tuples(st.none() | PLACES, st.none() | st.integers(0, 9))
KINDS = st.sampled_from([Payload, Masks, Vectors, Unpooled])
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)
USE = MemoryUse(1, 2, 3, 4, 0.5, 6, 7)


@given(
    rows=st.lists(
        st.tuples(IDS, st.booleans(), st.booleans(), KINDS, PAYLOADS), min_size=1, max_size=5
    ),
)
@settings(max_examples=50)
def test_a_batch_arrives_with_its_ids_types_and_options(rows):
    ours, theirs = Pipe()
    prompts = [
        Prompt(
            np.array(ids, dtype=np.int32),
            np.arange(len(ids), dtype=np.int32) if has_types else None,
            kind(*payload),
        )
        for ids, has_types, _, kind, payload in rows
    ]
    send_batch(ours, prompts, [RequestOptions(normalize=each) for _, _, each, *_ in rows])

    received, options = receive_batch(theirs)

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

    assert receive_answers(ours) == Answers([], USE, "error", "Traceback: é")
