"""Forms of embeddings, labels with scores, sparse vectors and filled masks."""

import numpy as np
import pytest

from varlen_client import FilledToken, InvalidRequest, LabelScore, ServerError, TokenLabel


@pytest.mark.parametrize(
    "form, dtype, width",
    [
        ({}, np.float32, 3),
        ({"dimensions": 2}, np.float32, 2),
        ({"output_dtype": "float16"}, np.float16, 3),
        ({"output_dtype": "ubinary"}, np.uint8, 1),
        ({"output_dtype": "ubinary", "dimensions": 2}, np.uint8, 1),
    ],
)
def test_embed_returns_the_form_that_it_asks_for(client, server, form, dtype, width):
    vectors = client.embed(["a", "bc"], truncation_side="left", truncate_prompt_tokens=5, **form)

    assert (vectors.dtype, vectors.shape) == (dtype, (2, width))
    cut = {"truncation_side": "left", "truncate_prompt_tokens": 5}
    assert server.model.requests[0].parameters == {**cut, **form}
    assert client.embed([], **form).shape == (0, width)


def test_spans_are_parts_of_one_text_with_a_vector_each(client, server, vectors_of):
    vectors = client.embed(["näïve cat"], spans=[(0, 5), (6, 9)], windows=True, window_overlap=4)

    np.testing.assert_array_equal(vectors, vectors_of(["näïve", "cat"]))
    sent = {"spans": "[[0,5],[6,9]]", "windows": True, "window_overlap": 4}
    assert server.model.requests[0].parameters == sent
    with pytest.raises(InvalidRequest, match="spans are parts of one text, and there are 2"):
        client.embed(["a", "b"], spans=[(0, 1)])


def test_refuses_a_form_that_does_not_exist(client):
    with pytest.raises(InvalidRequest, match='output_dtype is "fp16"; allowed: float32, float16'):
        client.embed(["a"], output_dtype="fp16")


def test_a_server_that_ignores_the_form_is_an_error(client, server):
    server.model.form_of = lambda vectors, parameters: vectors.astype(np.float32)

    with pytest.raises(
        ServerError, match=r"is float32 \[1, 3\]; expected float32 with 1 rows of 2"
    ):
        client.embed(["a"], dimensions=2)


def test_predict_returns_labels_with_the_best_first(client, server):
    server.model.task = "classify"

    rows = client.predict([("ab", "xyz"), ("abcd", "")], activation="softmax")

    assert rows == [
        [LabelScore("über 1", pytest.approx(0.003)), LabelScore("über 0", pytest.approx(0.002))],
        [LabelScore("über 0", pytest.approx(0.004)), LabelScore("über 1", 0.0)],
    ]
    assert server.model.requests[0].parameters == {"activation": "softmax"}
    assert server.model.requests[0].outputs == ("scores", "labels", "logits")


def test_predict_is_in_order_over_many_requests(client, server):
    server.model.task = "classify"

    rows = client.predict(["x" * (n + 1) for n in range(30)], top_k=1)

    scores = [label.score for [label] in rows]
    np.testing.assert_allclose(scores, np.arange(1, 31) / 1000, rtol=1e-5)
    assert client.predict([]) == []


def test_labels_of_equal_scores_are_in_the_order_of_their_logits(client, server):
    server.model.task, server.model.scores_of = "classify", np.ones_like

    rows = client.predict([("ab", "xyz"), ("abcd", "")])

    assert [[each.label for each in row] for row in rows] == [
        ["über 1", "über 0"],
        ["über 0", "über 1"],
    ]


def test_the_label_of_a_token_has_the_largest_logit_also_where_scores_are_equal(client, server):
    server.model.task, server.model.scores_of = "token_classify", np.ones_like

    [tokens] = client.predict_tokens(["a A"])

    assert [each.label for each in tokens] == ["O", "Ö"]


def test_predict_needs_a_server_that_has_scores(client, server):
    server.model.task, server.model.has_scores = "classify", False

    with pytest.raises(InvalidRequest, match="its task is classify; predict needs scores"):
        client.predict(["a"])
    with pytest.raises(InvalidRequest, match="top_k is 0; allowed: whole numbers from 1"):
        client.predict(["a"], top_k=0)


def test_rerank_returns_scores_if_there_is_an_activation(client, server):
    server.model.task = "rerank"

    logits = client.rerank("ab", ["c", "cd"])
    scores = client.rerank("ab", ["c", "cd"], activation="sigmoid")

    np.testing.assert_allclose(scores, logits / 1000, rtol=1e-6)
    assert [each.outputs for each in server.model.requests] == [("logits",), ("scores",)]
    assert server.model.requests[1].parameters == {"activation": "sigmoid"}


def test_an_integer_that_the_protocol_cannot_hold_is_refused(client):
    with pytest.raises(
        InvalidRequest, match="dimensions is 10{30}; allowed: up to 9223372036854775807"
    ):
        client.embed(["a"], dimensions=10**30)


def test_texts_and_labels_are_no_single_string(client):
    for ask in (
        lambda: client.extract(["a"], labels="person"),
        lambda: client.extract("a", labels=["person"]),
        lambda: client.zero_shot("a", ["sports"]),
        lambda: client.predict_entities("a"),
    ):
        with pytest.raises(InvalidRequest, match="got one string; pass a list of strings"):
            ask()


def test_sparse_vectors_have_the_terms_of_their_row_alone(client, server):
    server.model.task = "sparse_embed"
    texts = ["ab", "é", *("x" * (n + 1) for n in range(40))]

    vectors = client.sparse_embed(texts, with_terms=True, max_active_dims=7, prompt_name="query")

    assert vectors[0].terms == ("b", "a")
    assert vectors[0].indices.tolist() == [98, 97]
    assert vectors[0].values.tolist() == [2, 1]
    assert (vectors[0].indices.dtype, vectors[0].values.dtype) == (np.int32, np.float32)
    assert [len(each.indices) for each in vectors] == [len(text) for text in texts]
    assert server.model.requests[0].parameters == {"max_active_dims": 7, "prompt_name": "query"}
    assert "terms" in server.model.requests[0].outputs


def test_sparse_vectors_come_without_texts_unless_they_are_asked_for(client, server):
    server.model.task = "sparse_embed"

    [vector] = client.sparse_embed(["ab"])

    assert vector.terms == ()
    assert server.model.requests[0].outputs == ("indices", "values", "num_terms")
    assert client.sparse_embed([]) == []


def test_a_model_of_another_task_has_no_sparse_vectors(client):
    with pytest.raises(InvalidRequest, match="does not serve sparse_embed: its task is embed"):
        client.sparse_embed(["a"])


def test_masks_get_the_tokens_of_their_row_alone(client, server):
    server.model.task = "fill_mask"

    rows = client.fill_mask(["_", "a_b_", *("_" * (n + 1) for n in range(5))], top_k=2)

    assert rows[0] == [[FilledToken(1, "é1", 1.0), FilledToken(2, "é2", 0.5)]]
    assert [[token.token_id for token in mask] for mask in rows[1]] == [[4, 5], [4, 5]]
    assert [len(masks) for masks in rows] == [1, 2, 1, 2, 3, 4, 5]
    assert server.model.requests[0].parameters == {"top_k": 2}
    assert client.fill_mask([]) == []


def test_tokens_come_with_their_best_labels(client, server):
    server.model.task = "token_classify"

    first, second = client.predict_tokens(["in ZÜRICH", "a b c"], activation="softmax")

    assert first == [TokenLabel("in", "O", 0.25), TokenLabel("ZÜRICH", "Ö", 0.75)]
    assert [each.token for each in second] == ["a", "b", "c"]
    assert server.model.requests[0].parameters == {"activation": "softmax"}
    assert client.predict_tokens([]) == []
