"""Packing sequences into the inputs of a batch, with and without padding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.execution.packing import (
    InputLayout,
    dims_of,
    fill_inputs,
    largest_dims,
    payload_dims,
    prompt_arrays,
    split_answers,
)
from varlen.models.blocks import inputs as declare
from varlen.program.rank import AttentionHeads
from varlen.program.recorder import Recorder
from varlen.request.request import (
    Masks,
    Prompt,
    RequestOptions,
    Spans,
    Unpooled,
    Vectors,
    Words,
)

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
    declare.mask_rows(OPS),
]


def inputs_for(tokens, sequences, declared=ALL_INPUTS, masks=0, **others):
    """Return the inputs of a batch, packed into memory with other contents."""
    dims = {"tokens": tokens, "sequences": sequences, "masks": masks, **others}
    layout = InputLayout.of(declared, dims)
    return layout.views(torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8))


def fill(inputs, prompts, options):
    """Pack prompts into inputs."""
    views = {name: view.numpy() for name, view in inputs.items()}
    fill_inputs(views, prompt_arrays(views, prompts, options))


def test_sequences_lie_one_after_the_other():
    inputs = inputs_for(6, 3)
    prompts = [Prompt(ids(7, 8, 9), ids(0, 1, 1)), Prompt(ids(5, 6)), Prompt(ids(4), ids(1))]

    fill(inputs, prompts, [PLAIN, NORMALIZED, PLAIN])

    assert {name: view.tolist() for name, view in inputs.items()} == {
        "token_ids": [7, 8, 9, 5, 6, 4],
        "position_ids": [0, 1, 2, 0, 1, 0],
        "type_ids": [0, 1, 1, 0, 0, 1],
        "cu_seqlens": [0, 3, 5, 6],
        "normalize": [False, True, False],
        "mask_rows": [],
    }


def test_room_to_spare_holds_tokens_of_no_sequence_and_sequences_of_no_token():
    inputs = inputs_for(6, 4)

    fill(inputs, [Prompt(ids(7, 8)), Prompt(ids(9))], [NORMALIZED, NORMALIZED])

    assert {name: view.tolist() for name, view in inputs.items()} == {
        "token_ids": [7, 8, 9, 0, 0, 0],
        "position_ids": [0, 1, 0, 0, 0, 0],
        "type_ids": [0, 0, 0, 0, 0, 0],
        "cu_seqlens": [0, 2, 3, 3, 3],
        "normalize": [True, True, False, False],
        "mask_rows": [],
    }


def test_a_batch_carries_only_the_inputs_that_are_declared():
    inputs = inputs_for(3, 2, [ALL_INPUTS[3], ALL_INPUTS[0]])

    fill(inputs, [Prompt(ids(7, 8), ids(1, 1)), Prompt(ids(9))], [PLAIN, NORMALIZED])

    assert {name: view.tolist() for name, view in inputs.items()} == {
        "cu_seqlens": [0, 2, 3],
        "token_ids": [7, 8, 9],
    }


def test_options_are_bool_whatever_a_caller_gives():
    names = ["normalize", "normalize_tokens"]

    arrays = prompt_arrays(names, [Prompt(ids(7, 8)), Prompt(ids(9))], [RequestOptions(1), PLAIN])

    assert {array.dtype for array in arrays.values()} == {np.dtype(np.bool_)}
    assert arrays["normalize_tokens"].tolist() == [True, True, False]


def test_refuses_an_input_that_prompts_do_not_have():
    inputs = inputs_for(2, 1, [Recorder().input("slots", ("tokens",), torch.int32)])

    with pytest.raises(ValueError, match='reads an input "slots", which prompts do not have'):
        fill(inputs, [Prompt(ids(7, 8))], [PLAIN])


def test_the_dimensions_of_a_batch_are_those_of_its_inputs():
    inputs = inputs_for(**dims_of([3, 1, 2]))

    assert {name: len(view) for name, view in inputs.items()} == {
        "token_ids": 6,
        "position_ids": 6,
        "type_ids": 6,
        "cu_seqlens": 4,
        "normalize": 3,
        "mask_rows": 0,
    }


@pytest.mark.parametrize(
    "tokens, max_sequences, sequences, masks", [(9, None, 9, 9), (9, 20, 9, 9), (99, 3, 3, 24)]
)
def test_the_largest_batch_has_as_many_sequences_and_masks_as_fit(
    tokens, max_sequences, sequences, masks
):
    assert largest_dims(tokens, max_sequences) == {
        "tokens": tokens,
        "sequences": sequences,
        "masks": masks,
        # each token may be a word; one sequence may have 512 labels without tokens of their own
        "words": tokens,
        "labels": 512,
        "instances": 512,
        "pairs": 512 * tokens,
        # each token may be a span
        "pooled": tokens,
        "pooled_tokens": 8 * tokens,
    }


def test_spans_and_whole_sequences_are_pooled_side_by_side():
    names = ["cu_pooled", "pooled_rows", "normalize", "unpooled_lengths"]
    plain = [Prompt(ids(7, 8, 9)), Prompt(ids(5, 6), payload=Unpooled(count=1))]
    spans = Prompt(ids(7, 8, 9, 6), payload=Spans(ids(0, 2, 1, 4, 4, 2)))

    arrays = prompt_arrays(names, plain, [PLAIN, NORMALIZED])
    assert {name: each.tolist() for name, each in arrays.items()} == {
        "cu_pooled": [0, 3, 5],
        "pooled_rows": [],
        "normalize": [False, True],
        "unpooled_lengths": [0, 1],
    }
    arrays = prompt_arrays(names, [plain[0], spans, plain[1]], [PLAIN, NORMALIZED, PLAIN])
    assert {name: each.tolist() for name, each in arrays.items()} == {
        "cu_pooled": [0, 3, 7, 9, 10, 11],
        "pooled_rows": [0, 1, 2, 3, 4, 5, 6, 5, 6, 4, 8],
        "normalize": [False, True, True, True, False],
        "unpooled_lengths": [0, 0, 0, 0, 0],
    }
    output = np.arange(10, dtype=np.float32).reshape(5, 2)
    first, of_spans, last = split_answers(output, [plain[0], spans, plain[1]], "pooled")
    assert first.tolist() == [0, 1]
    assert of_spans.tolist() == [[2, 3], [4, 5], [6, 7]]
    assert last.tolist() == [8, 9]
    assert [
        each.tolist() for each in split_answers(output, [plain[0]] * 5, "pooled")
    ] == output.tolist()


@given(st.integers(1, 100), st.integers(1, 100))
def test_every_input_starts_where_kernels_may_load_16_bytes(tokens, sequences):
    dims = {"tokens": tokens, "sequences": sequences, "masks": sequences}
    layout = InputLayout.of(ALL_INPUTS, dims)
    size = layout.num_bytes
    buffer = torch.zeros(size, dtype=torch.uint8)
    views = layout.views(buffer)

    begins = [view.data_ptr() - buffer.data_ptr() for view in views.values()]
    ends = [
        begin + view.numel() * view.itemsize
        for begin, view in zip(begins, views.values(), strict=True)
    ]

    assert all(begin % 16 == 0 for begin in begins)
    # one after the other, so none overlaps, and inside the buffer; no space is wasted
    spare = [begin - end for end, begin in zip(ends, [*begins[1:], size], strict=True)]
    assert all(0 <= each < 16 for each in spare)


def test_words_and_labels_lie_one_sequence_after_the_other():
    ops = Recorder()
    names = "word_rows label_rows task_rows instance_numbers cu_words cu_labels cu_instances"
    declared = [getattr(declare, name)(ops) for name in names.split()]
    several = [(2, 0, 1), (2, 1, 1), (1, -1, 2)]
    prompts = [
        Prompt(ids(7, 8, 9, 6), payload=Words.at(ids(0), ids(1, 3))),
        Prompt(ids(5, 6)),
        Prompt(ids(4, 3, 2), payload=Words.at(ids(0, 0, 1, 1), ids(2), several)),
    ]
    dims = payload_dims(prompts)
    assert dims == {"masks": 0, "words": 3, "labels": 5, "instances": 3, "pairs": 6}
    inputs = inputs_for(9, 3, declared, **dims)

    fill(inputs, prompts, [PLAIN] * 3)

    assert {name: view.tolist() for name, view in inputs.items()} == {
        "word_rows": [1, 3, 8],
        "label_rows": [0, 6, 6, 7, 7],
        "task_rows": [8, 8, 7],
        "instance_numbers": [0, 1, -1],
        "cu_words": [0, 2, 2, 3],
        "cu_labels": [0, 1, 1, 5],
        "cu_instances": [0, 1, 2, 4],
    }


def test_sequences_may_have_fewer_keys_than_tokens():
    later = Recorder(has_key_lengths=True)
    qkv, bounds = later.input("qkv", ("tokens", 3), torch.float32), declare.cu_seqlens(later)
    later.attention_varlen(qkv, bounds, AttentionHeads(1, 1, 1), scale=1.0)
    key_lengths = later.input("key_lengths", ("sequences",), torch.int32)
    inputs = inputs_for(6, 3, [key_lengths, declare.normalize_tokens(OPS)])

    prompts = [Prompt(ids(7, 8, 9), payload=Vectors(count=2)), Prompt(ids(5, 6))]
    fill(inputs, prompts, [PLAIN, NORMALIZED])

    assert inputs["key_lengths"].tolist() == [2, 2, 0]
    assert inputs["normalize_tokens"].tolist() == [False, False, False, True, True, False]


def test_sequences_may_start_with_tokens_that_are_not_pooled():
    inputs = inputs_for(6, 3, [declare.unpooled_lengths(OPS)])

    fill(inputs, [Prompt(ids(7, 8, 9), payload=Unpooled(count=2)), Prompt(ids(5, 6))], [PLAIN] * 2)

    assert inputs["unpooled_lengths"].tolist() == [2, 0, 0]


def test_masks_are_rows_of_the_batch_and_spare_rows_are_the_first_token():
    inputs = inputs_for(8, 3, masks=5)
    masked = [Prompt(ids(7, 8, 9), payload=Masks(ids(0, 2))), Prompt(ids(9), payload=Masks(ids(0)))]

    fill(inputs, [masked[0], Prompt(ids(5)), masked[1]], [PLAIN] * 3)

    assert inputs["mask_rows"].tolist() == [0, 2, 4, 0, 0]


@pytest.mark.parametrize(
    "dimension, expected",
    [
        ("tokens", [[0, 1, 2], [3], [4, 5]]),
        ("sequences", [0, 1, 2]),
        ("masks", [[0, 1], [], [2]]),
    ],
)
def test_answers_are_cut_by_the_rows_of_a_sequence(dimension, expected):
    rows = np.arange(6 if dimension == "tokens" else 3, dtype=np.float32)
    masks = ([0, 2], None, [1])
    prompts = [
        Prompt(ids(*range(length)), payload=Masks(None if places is None else ids(*places)))
        for length, places in zip((3, 1, 2), masks, strict=True)
    ]

    answers = split_answers(rows, prompts, dimension)

    assert [answer.tolist() for answer in answers] == expected
