"""The outputs of each task: their names and shapes, and the arrays of a response."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.models.checkpoint.family import Labels
from varlen.request.vectors import VECTOR_DTYPES, VectorForm
from varlen.tasks import TensorSpec
from varlen.wire.outputs import AnswerOptions, ArrayAnswer, ModelOutputs

LABELS = Labels(("negative", "neutral", "¡positive!"), "softmax")
ALL = ("sentence_embedding", "last_hidden_state", "logits", "scores", "labels", "num_tokens")
TEXTS = [b"[CLS]", "Zürich".encode(), b"##er", b"a", b"b", b"c", b"[SEP]"]


def outputs_of(task):
    return ModelOutputs(task, 384 if task in ("embed", "hidden") else 3, LABELS, normalize=False)


def answer(task, rows, names=ALL, *, order=None, lengths=None, **options):
    """Return the tensors of a response, whose rows come in this order."""
    lengths = lengths or [len(row) for row in rows]
    maker = ArrayAnswer(
        outputs_of(task),
        AnswerOptions(frozenset(names), **options),
        lengths,
        lengths,
        [TEXTS[:length] for length in lengths],
    )
    return maker.tensors([(row, rows[row]) for row in order or range(len(rows))])


def fp32(*rows):
    return [np.array(row, dtype=np.float32) for row in rows]


@pytest.mark.parametrize(
    "task, name, dims",
    [
        ("embed", "sentence_embedding", (384,)),
        ("hidden", "last_hidden_state", (-1, 384)),
        ("classify", "logits", (3,)),
        ("rerank", "logits", (3,)),
        ("token_classify", "logits", (-1, 3)),
    ],
)
def test_outputs_have_the_task_s_shape(task, name, dims):
    main, *others = outputs_of(task).specs

    assert main == TensorSpec(name, "TYPE_FP32", dims)
    assert others.pop() == TensorSpec("num_tokens", "TYPE_INT32", (1,))
    if task == "token_classify":
        assert others.pop() == TensorSpec("entities", "TYPE_STRING", (1,))
        assert others.pop() == TensorSpec("tokens", "TYPE_STRING", (-1,))
    if name == "logits":
        assert others == [
            TensorSpec("scores", "TYPE_FP32", dims),
            TensorSpec("labels", "TYPE_STRING", (3,)),
        ]


@pytest.mark.parametrize("task", ["embed", "classify", "rerank"])
def test_an_answer_of_one_row_a_sequence_is_stacked(task):
    rows = fp32([1, 2], [3, 4])

    [array] = answer(task, rows, ALL[:3], order=[1, 0]).values()

    assert array.tolist() == [[1, 2], [3, 4]]
    assert array.dtype == np.float32
    assert not any(np.shares_memory(array, row) for row in rows)


def test_vectors_of_tokens_come_with_their_number():
    rows = fp32(np.ones((2, 3)), np.ones((0, 3)), np.ones((4, 3)))
    names = ["token_embeddings", "num_vectors", "num_tokens"]
    options = AnswerOptions(frozenset(names))
    maker = ArrayAnswer(outputs_of("token_embed"), options, [5, 3, 4], [2, 0, 4])

    arrays = maker.tensors(list(enumerate(rows)))

    assert list(arrays) == names
    assert arrays["token_embeddings"].shape == (3, 4, 3)
    assert arrays["token_embeddings"].sum(axis=(1, 2)).tolist() == [6, 0, 12]
    assert arrays["num_vectors"].tolist() == [[2], [0], [4]]
    assert arrays["num_tokens"].tolist() == [[5], [3], [4]]
    assert maker.num_bytes == sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("task", ["hidden", "token_classify"])
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_an_answer_by_token_is_filled_up_with_zeros(task, lengths):
    rows = [np.full((n, 3), n, dtype=np.float32) for n in lengths]

    arrays = answer(task, rows, function="softmax")

    assert arrays["num_tokens"].tolist() == [[n] for n in lengths]
    assert arrays["num_tokens"].dtype == np.int32
    for name in arrays.keys() - {"num_tokens", "labels"}:
        assert arrays[name].shape == (len(lengths), max(lengths), 3)
        assert arrays[name].dtype == np.float32
        for index, n in enumerate(lengths):
            assert (arrays[name][index, :n] != 0).all()
            assert (arrays[name][index, n:] == 0).all()
            assert not np.shares_memory(arrays[name], rows[index])


def test_tokens_come_as_the_tokenizer_writes_them():
    rows = fp32(np.ones((3, 3)), np.ones((2, 3)))

    arrays = answer("token_classify", rows, ["tokens", "scores"])

    assert list(arrays) == ["scores", "tokens"]
    assert arrays["tokens"].tolist() == [TEXTS[:3], [*TEXTS[:2], b""]]


@pytest.mark.parametrize("names", [("num_tokens",), ("labels", "logits"), ALL], ids=str)
def test_a_response_has_the_requested_outputs_in_the_order_of_the_config(names):
    arrays = answer("classify", fp32([1, 2, 3]), names, lengths=[7])

    assert list(arrays) == [name for name in ALL if name in names and name in CLASSIFY]


CLASSIFY = ("logits", "scores", "labels", "num_tokens")


def test_labels_are_in_the_order_of_the_logits():
    arrays = answer("classify", fp32([1, 2, 3], [3, 2, 1]), lengths=[7, 8])

    assert arrays["labels"].dtype == np.object_
    assert [[label.decode() for label in row] for row in arrays["labels"]] == [[*LABELS.names]] * 2


@pytest.mark.parametrize(
    "function, expected",
    [
        ("softmax", lambda logits: torch.softmax(logits, -1)),
        ("sigmoid", torch.sigmoid),
        ("none", lambda logits: logits),
    ],
)
@pytest.mark.parametrize("task", ["classify", "token_classify"])
def test_scores_are_those_of_torch(task, function, expected):
    logits = np.random.default_rng(0).normal(0, 20, (4, 3)).astype(np.float32)
    logits[0], logits[1] = 1e4, [-1e4, 0, 1e4]
    rows = list(logits) if task == "classify" else [logits]

    arrays = answer(task, rows, lengths=[4] * len(rows), function=function)

    scores = arrays["scores"].reshape(4, 3)
    np.testing.assert_allclose(scores, expected(torch.tensor(logits)), rtol=1e-5, atol=1e-7)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(arrays["logits"].reshape(4, 3), logits)


def test_embeddings_have_the_form_that_the_request_asks_for():
    rows = fp32([3, 4, 5], [0, 0, 1])

    arrays = answer("embed", rows, lengths=[2, 9], vectors=VectorForm(2, normalize=True))

    np.testing.assert_allclose(arrays["sentence_embedding"], [[0.6, 0.8], [0, 0]], rtol=1e-6)
    assert arrays["num_tokens"].tolist() == [[2], [9]]


SPARSE = [np.array(rows, dtype=np.float32) for rows in ([[7, 3.5], [2, 1.25], [9, 0.5]], [[4, 2]])]
SPARSE_NAMES = ("indices", "values", "terms", "num_terms", "num_tokens")


def test_sparse_vectors_are_filled_up_with_zeros():
    arrays = answer("sparse_embed", SPARSE, SPARSE_NAMES, order=[1, 0], lengths=[5, 3])

    assert {name: array.tolist() for name, array in arrays.items()} == {
        "indices": [[7, 2, 9], [4, 0, 0]],
        "values": [[3.5, 1.25, 0.5], [2, 0, 0]],
        "terms": [[b"7", b"2", b"9"], [b"4", b"", b""]],
        "num_terms": [[3], [1]],
        "num_tokens": [[5], [3]],
    }
    types = [array.dtype for array in arrays.values()]
    assert types == [np.int32, np.float32, np.object_, np.int32, np.int32]


def test_a_request_may_ask_for_the_largest_weights_alone():
    arrays = answer("sparse_embed", SPARSE, SPARSE_NAMES[:2], lengths=[5, 3], max_active_dims=2)

    assert arrays["indices"].tolist() == [[7, 2], [4, 0]]
    assert arrays["values"].tolist() == [[3.5, 1.25], [2, 0]]


def test_texts_without_terms_have_empty_vectors():
    arrays = answer("sparse_embed", [np.empty((0, 2), np.float32)], SPARSE_NAMES, lengths=[5])

    assert arrays["indices"].shape == arrays["terms"].shape == (1, 1)
    assert arrays["num_terms"].tolist() == [[0]]


def test_the_outputs_of_sparse_vectors_have_any_number_of_terms():
    assert [
        (spec.name, spec.data_type, spec.dims) for spec in outputs_of("sparse_embed").specs
    ] == [
        ("indices", "TYPE_INT32", (-1,)),
        ("values", "TYPE_FP32", (-1,)),
        ("terms", "TYPE_STRING", (-1,)),
        ("num_terms", "TYPE_INT32", (1,)),
        ("num_tokens", "TYPE_INT32", (1,)),
    ]


def test_tokens_of_masks_are_filled_up_with_zeros():
    rows = fp32([[[7, 2, 9], [0.5, 0.25, 0.125]]], [[[1, 2, 3], [1, 0, 0]], [[4, 5, 6], [1, 0, 0]]])
    names = ("token_ids", "scores", "tokens", "num_masks", "num_tokens")

    arrays = answer("fill_mask", rows, names, lengths=[5, 3], top_k=2)

    assert {name: array.tolist() for name, array in arrays.items()} == {
        "token_ids": [[[7, 2], [0, 0]], [[1, 2], [4, 5]]],
        "scores": [[[0.5, 0.25], [0, 0]], [[1, 0], [1, 0]]],
        "tokens": [[[b"7", b"2"], [b"", b""]], [[b"1", b"2"], [b"4", b"5"]]],
        "num_masks": [[1], [2]],
        "num_tokens": [[5], [3]],
    }
    assert [array.dtype for array in arrays.values()][:2] == [np.int32, np.float32]


@pytest.mark.parametrize("task", ["embed", "hidden", "classify", "rerank", "token_classify"])
@pytest.mark.parametrize("dtype", VECTOR_DTYPES)
@pytest.mark.parametrize(
    "names",
    [ALL, ALL[:1], ALL[1:3], ALL[3:], ("tokens",)],
    ids=["all", "vector", "main", "others", "tokens"],
)
def test_the_size_of_an_answer_is_known_before_it_runs(task, dtype, names):
    outputs = outputs_of(task)
    lengths = [3, 1, 5]
    shapes = [
        (n, outputs.width) if task in ("hidden", "token_classify") else (outputs.width,)
        for n in lengths
    ]
    options = AnswerOptions(
        frozenset(names), VectorForm(dimensions=128 if task == "embed" else None, dtype=dtype)
    )
    maker = ArrayAnswer(outputs, options, lengths, lengths, [TEXTS[:n] for n in lengths])

    arrays = maker.tensors([(row, np.ones(shape, np.float32)) for row, shape in enumerate(shapes)])

    strings = [text for array in arrays.values() if array.dtype == object for text in array.flat]
    numbers = [array.nbytes for array in arrays.values() if array.dtype != object]
    assert maker.num_bytes == sum(numbers) + sum(4 + len(text) for text in strings)
