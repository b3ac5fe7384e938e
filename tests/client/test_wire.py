"""Rows of requests, how they are divided, and what a config says of its model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen_client import InvalidRequest, wire
from varlen_client.wire import ModelInfo, read_inputs

from .fake_model import OUTPUTS


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 5), st.integers(1, 60))
def test_rows_of_token_ids_are_divided_where_padding_would_be_large(lengths, size, most):
    rows = read_inputs([[1] * length for length in lengths])
    with_limit, wire._MAX_PADDED_IDS = wire._MAX_PADDED_IDS, most
    try:
        ranges = rows.split(size)
    finally:
        wire._MAX_PADDED_IDS = with_limit

    assert [row for each in ranges for row in each] == list(range(len(lengths)))
    for each in ranges:
        assert 1 <= len(each) <= size
        assert len(each) == 1 or len(each) * max(lengths[row] for row in each) <= most


def test_a_request_of_one_long_row_and_many_short_ones_is_small():
    rows = read_inputs([[1] * 200_000, *([[1]] * 99)])

    sent = [tensor.array for each in rows.split(100) for tensor in rows.tensors(each)]

    assert sum(array.nbytes for array in sent) <= 4 * 8 * wire._MAX_PADDED_IDS
    assert sum(np.count_nonzero(array) for array in sent if array.shape[1] > 1) >= 200_000


@pytest.mark.parametrize("dtype", [None, np.uint64])
def test_a_token_id_that_64_bits_with_a_sign_do_not_hold_is_refused(dtype):
    largest = 2**63 - 1
    rows = [np.array([1, largest], dtype=dtype), np.array([largest + 1], dtype=np.uint64)]

    assert read_inputs(rows[:1]).ids[0].tolist() == [1, largest]
    with pytest.raises(InvalidRequest, match=f"row 1 has the token id {largest + 1}; allowed: up"):
        read_inputs(rows)


@pytest.mark.parametrize("token_id", [2**63, 2**64, 10**4000])
def test_a_large_token_id_in_a_list_is_refused(token_id):
    with pytest.raises(InvalidRequest, match="row 0 (has the token id|is neither)"):
        read_inputs([[1, token_id]])


@pytest.mark.parametrize("task", OUTPUTS)
def test_the_task_of_a_config_without_one_is_that_of_its_outputs(task):
    outputs = {name: tuple(dims) for name, dims in OUTPUTS[task].items()}

    by_outputs = ModelInfo("a", 8, outputs)
    by_settings = ModelInfo("a", 8, outputs, {"task": task})

    # a model of several tasks has the first one
    known = {"rerank": "classify", "translate": "generate", "several": "embed"}
    assert by_outputs.known_task == known.get(task, task)
    assert by_settings.known_task == task
    assert by_outputs.labels_texts == by_settings.labels_texts == (task in ("classify", "rerank"))


def test_outputs_of_no_task_have_none():
    assert ModelInfo("a", 8, {"OUTPUT0": (16,), "logits": (2, 3, 4)}).known_task is None
