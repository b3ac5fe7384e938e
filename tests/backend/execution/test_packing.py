"""Packing sequences into the inputs of a batch, with and without padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.execution.packing import dims_of, fill_inputs, input_bytes, input_views, split_answers
from varlen.models import inputs as declare
from varlen.program.recorder import Recorder
from varlen.request import Prompt, RequestOptions

PLAIN, NORMALIZED = RequestOptions(), RequestOptions(normalize=True)


def ids(*values):
    return np.array(values, dtype=np.int32)


OPS = Recorder()
ALL_INPUTS = [
    declare.token_ids(OPS),
    declare.position_ids(OPS),
    declare.type_ids(OPS),
    declare.cu_seqlens(OPS),
    declare.normalize(OPS),
]


def inputs_for(tokens, sequences, declared=ALL_INPUTS):
    """Return the inputs of a batch, packed into memory with other contents."""
    dims = {"tokens": tokens, "sequences": sequences}
    buffer = torch.full((input_bytes(declared, dims),), 0xAB, dtype=torch.uint8)
    return input_views(buffer, declared, dims)


def test_sequences_lie_one_after_the_other():
    inputs = inputs_for(5, 2)

    fill_inputs(
        inputs, [Prompt(ids(7, 8, 9), ids(0, 1, 1)), Prompt(ids(5, 6))], [PLAIN, NORMALIZED]
    )

    assert {name: view.tolist() for name, view in inputs.items()} == {
        "token_ids": [7, 8, 9, 5, 6],
        "position_ids": [0, 1, 2, 0, 1],
        "type_ids": [0, 1, 1, 0, 0],
        "cu_seqlens": [0, 3, 5],
        "normalize": [False, True],
    }


def test_room_to_spare_holds_tokens_of_no_sequence_and_sequences_of_no_token():
    inputs = inputs_for(6, 4)

    fill_inputs(inputs, [Prompt(ids(7, 8)), Prompt(ids(9))], [NORMALIZED, NORMALIZED])

    assert {name: view.tolist() for name, view in inputs.items()} == {
        "token_ids": [7, 8, 9, 0, 0, 0],
        "position_ids": [0, 1, 0, 0, 0, 0],
        "type_ids": [0, 0, 0, 0, 0, 0],
        "cu_seqlens": [0, 2, 3, 3, 3],
        "normalize": [True, True, False, False],
    }


def test_a_batch_carries_only_the_inputs_that_are_declared():
    inputs = inputs_for(3, 2, [ALL_INPUTS[3], ALL_INPUTS[0]])

    fill_inputs(inputs, [Prompt(ids(7, 8), ids(1, 1)), Prompt(ids(9))], [PLAIN, NORMALIZED])

    assert {name: view.tolist() for name, view in inputs.items()} == {
        "cu_seqlens": [0, 2, 3],
        "token_ids": [7, 8, 9],
    }


def test_refuses_an_input_that_prompts_do_not_have():
    inputs = inputs_for(2, 1, [Recorder().input("slots", ("tokens",), torch.int32)])

    with pytest.raises(ValueError, match='reads an input "slots", which prompts do not have'):
        fill_inputs(inputs, [Prompt(ids(7, 8))], [PLAIN])


def test_the_dimensions_of_a_batch_are_those_of_its_inputs():
    inputs = inputs_for(**dims_of([3, 1, 2]))

    assert {name: len(view) for name, view in inputs.items()} == {
        "token_ids": 6,
        "position_ids": 6,
        "type_ids": 6,
        "cu_seqlens": 4,
        "normalize": 3,
    }


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 100))
def test_every_input_starts_where_kernels_may_load_16_bytes(tokens, sequences):
    dims = {"tokens": tokens, "sequences": sequences}
    size = input_bytes(ALL_INPUTS, dims)
    buffer = torch.zeros(size, dtype=torch.uint8)
    views = input_views(buffer, ALL_INPUTS, dims)

    begins = [view.data_ptr() - buffer.data_ptr() for view in views.values()]
    ends = [
        begin + view.numel() * view.itemsize
        for begin, view in zip(begins, views.values(), strict=True)
    ]

    assert all(begin % 16 == 0 for begin in begins)
    # one after the other, so none overlaps, and inside the buffer
    assert all(end <= begin for end, begin in zip(ends, [*begins[1:], size], strict=True))


@pytest.mark.parametrize(
    "per_token, expected", [(True, [[0, 1, 2], [3], [4, 5]]), (False, [0, 1, 2])], ids=str
)
def test_answers_are_cut_by_token_or_by_row(per_token, expected):
    rows = np.arange(6 if per_token else 3, dtype=np.float32)

    answers = split_answers(rows, [3, 1, 2], per_token=per_token)

    assert [answer.tolist() for answer in answers] == expected
