"""Several outputs of each row in one call: `outputs`."""

import numpy as np
import pytest

from varlen_client import InvalidRequest, ServerError

from .fake_model import vector_of_text

TEXTS = ["ab c", "d"]


@pytest.fixture
def model(server):
    """The fake model, with several outputs."""
    server.model.task = "several"
    return server.model


@pytest.mark.parametrize(
    "tasks, names",
    [
        (["embed"], ("sentence_embedding",)),
        (["classify"], ("logits",)),
        # both are the same output
        (["rerank", "classify"], ("logits",)),
        (["sparse_embed"], ("sparse_indices", "sparse_values", "sparse_num_terms")),
        (
            ["sparse_embed", "embed"],
            ("sparse_indices", "sparse_values", "sparse_num_terms", "sentence_embedding"),
        ),
    ],
)
def test_a_request_names_the_outputs_of_its_tasks(client, model, tasks, names):
    rows = client.outputs(TEXTS, tasks, tenant="a")

    assert [tuple(row) for row in rows] == [tuple(tasks)] * 2
    [request] = model.requests
    assert request.outputs == names
    assert request.parameters == {"tenant": "a"}


def test_each_row_has_its_outputs_by_task(client, model):
    rows = client.outputs(TEXTS, ["token_embed", "sparse_embed", "embed", "classify", "hidden"])

    # rows of one request would be padded
    assert [request.num_rows for request in model.requests] == [1, 1]
    for text, row in zip(TEXTS, rows, strict=True):
        words = np.stack([vector_of_text(word) for word in text.split()])
        np.testing.assert_array_equal(row["embed"], vector_of_text(text))
        np.testing.assert_array_equal(row["token_embed"], words)
        np.testing.assert_array_equal(row["hidden"], words)
        np.testing.assert_array_equal(row["classify"], [len(text), 0])
        assert row["sparse_embed"].indices.tolist() == [ord(letter) for letter in text[::-1]]
        assert row["sparse_embed"].values.tolist() == list(range(len(text), 0, -1))
        # an array of its own, which does not keep the response
        assert row["embed"].base is None


def test_rows_are_in_order_over_many_requests(client, model):
    texts = ["x" * (n + 1) for n in range(30)]

    rows = client.outputs(texts, ["sparse_embed", "embed"])

    assert [len(row["sparse_embed"].indices) for row in rows] == list(range(1, 31))
    np.testing.assert_array_equal(
        [row["embed"] for row in rows], np.stack([vector_of_text(text) for text in texts])
    )
    assert len(model.requests) > 1
    assert client.outputs([], ["embed"]) == []


def test_a_task_that_is_named_twice_is_there_once(client, model):
    [row] = client.outputs(["a"], ["embed", "embed"])

    assert list(row) == ["embed"]
    assert model.requests[0].outputs == ("sentence_embedding",)


def test_options_are_those_of_vectors_and_of_terms(client, model):
    [row] = client.outputs(["abc"], ["embed"], dimensions=2, max_active_dims=5, normalize=True)

    assert row["embed"].shape == (2,)
    assert model.requests[0].parameters == {
        "dimensions": 2,
        "max_active_dims": 5,
        "normalize": True,
    }


@pytest.mark.parametrize(
    "tasks, options, message",
    [
        ([], {}, r"tasks is \[\]; allowed: one or more of sparse_embed, embed, token_embed"),
        (["embed", "fill_mask"], {}, "allowed: one or more of"),
        (["embed"], {"output_dtype": "int8"}, "output_dtype is int8; allowed with several outputs"),
    ],
)
def test_refuses_what_no_model_answers(client, model, tasks, options, message):
    with pytest.raises(InvalidRequest, match=message):
        client.outputs(["a"], tasks, **options)
    assert model.requests == []


def test_refuses_an_output_that_the_model_does_not_have(client, server):
    with pytest.raises(InvalidRequest, match="outputs.*token_embeddings"):
        client.outputs(["a"], ["embed", "token_embed"])
    assert server.model.requests == []


def test_an_output_of_another_shape_is_an_error(client, model):
    model.form_of = lambda vectors, parameters: vectors[:, :1]

    with pytest.raises(ServerError, match="sentence_embedding is float32"):
        client.outputs(["a"], ["embed"])
