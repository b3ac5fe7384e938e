"""Options and routes of Text Embeddings Inference: `parameters`, `/embed_all`, `/similarity`, `/`."""

import json

import numpy as np
import pytest

from varlen_client.gateway import tei

from .fake_models import score_of, tokens_of, vector_of

EMBEDDER = {"model": "embedder", "inputs": "ab"}


@pytest.mark.parametrize(
    "path, body, parameters, expected",
    [
        ("/embed", EMBEDDER, {"normalize": False, "truncate": True}, {"normalize": False}),
        ("/embed_sparse", {"model": "sparse", "inputs": "ab"}, {"prompt_name": "p"}, {"prompt_name": "p"}),
        ("/predict", {"model": "classifier", "inputs": "ab"}, {"top_k": 1}, {"top_k": 1}),
        (
            "/predict",
            {"model": "classifier", "inputs": "ab"},
            {"function_to_apply": "softmax"},
            {"activation": "softmax"},
        ),
    ],
    ids=["embed", "sparse", "top_k", "function"],
)  # fmt: skip
def test_options_may_stand_in_parameters(post, calls, path, body, parameters, expected):
    nested = post(path, **body, parameters=parameters, options={"wait_for_model": True})

    assert nested == post(path, **body, **parameters)
    assert calls.received[0] == calls.received[1]
    assert calls.received[0][3].items() >= expected.items()


def test_clients_that_have_no_parameters_send_an_empty_object_or_null(post):
    expected = post("/embed", **EMBEDDER)

    assert post("/embed", **EMBEDDER, parameters={}, options=None) == expected


@pytest.mark.parametrize(
    "path, options, param, message",
    [
        (
            "/embed",
            {"parameters": {"late_chunking": True}},
            "parameters.late_chunking",
            "is not supported",
        ),
        ("/embed", {"parameters": 5}, "parameters", "parameters is 5"),
        (
            "/embed",
            {"truncate": True, "parameters": {"truncate": True}},
            None,
            "truncate is in the body and in its parameters; send it in one of them",
        ),
        (
            "/predict",
            {"raw_scores": True, "function_to_apply": "none"},
            None,
            "raw_scores and function_to_apply",
        ),
    ],
    ids=["unserved", "number", "twice", "function"],
)
def test_wrong_parameters_are_refused_by_name(refusal, calls, path, options, param, message):
    status, error = refusal(path, **EMBEDDER, **options)

    assert (status, error["param"]) == (400, param)
    assert message in error["message"]
    assert calls.received == []


@pytest.mark.parametrize("model, method", [("tokens", "token_embed"), ("states", "hidden")])
def test_embed_all_has_a_vector_for_each_token(post, calls, model, method):
    answer = post("/embed_all", model=model, inputs=["abc", "d"], truncate=True)

    assert [len(row) for row in answer] == [3, 1]
    for row, text in zip(answer, ["abc", "d"], strict=True):
        np.testing.assert_array_equal(np.float32(row), tokens_of(text))
    options = {"truncate": True}
    assert calls.received == [(model, method, ["abc", "d"], options)]


@pytest.mark.parametrize(
    "model, options, message",
    [
        ("ranker", {}, "model 'ranker' has logits; embed_all needs one of token_embeddings, last_"),
        ("states", {"prompt_name": "query"}, "whose texts have no prompt"),
        ("tokens", {"inputs": ["ab", "é"]}, "inputs has 4 bytes of text or token ids; allowed: up"),
        ("tokens", {"inputs": [[1, 2], [3, 4]]}, "up to 3, since each may have 4 numbers"),
        ("unknown_width", {}, "allowed: up to 0, since each may have 16384 numbers"),
    ],
    ids=["model", "prompt", "texts", "ids", "width"],
)
def test_embed_all_refuses_other_models_and_large_answers(
    refusal, calls, monkeypatch, model, options, message
):
    monkeypatch.setattr(tei, "MAX_TOKEN_FEATURES", 12)

    status, error = refusal("/embed_all", **{"model": model, "inputs": "ab", **options})

    assert status == 400
    assert message in error["message"]
    assert calls.received == []


def test_similarities_are_cosines(post, calls):
    inputs = {"source_sentence": "a", "sentences": ["b", "a"]}
    parameters = {"truncate": True, "truncation_direction": "Left", "prompt_name": "query"}

    found = post("/similarity", model="embedder", inputs=inputs, parameters=parameters)

    one, other = vector_of("a"), vector_of("b")
    np.testing.assert_allclose(found, [one @ other, 1.0], rtol=1e-5)
    options = {"truncate": True, "truncation_side": "left", "prompt_name": "query"}
    assert calls.received == [
        ("embedder", "embed", ["a", "b", "a"], {**options, "normalize": True})
    ]


@pytest.mark.parametrize(
    "inputs", [{"source_sentence": "a", "sentences": []}, {"sentences": ["a"]}, "a"]
)
def test_sentences_are_compared_with_one(refusal, inputs):
    status, error = refusal("/similarity", model="embedder", inputs=inputs)

    assert status == 400
    assert error["param"].startswith("inputs")


@pytest.mark.parametrize(
    "path, body",
    [
        ("/embed", {"model": "embedder", "inputs": ["ab", "c"], "truncate": True}),
        ("/embed_sparse", {"model": "sparse", "inputs": ["ab", "c"]}),
        ("/predict", {"model": "classifier", "inputs": "ab", "parameters": {"top_k": 2}}),
        ("/rerank", {"model": "ranker", "query": "a", "texts": ["b", "c"]}),
        (
            "/similarity",
            {"model": "embedder", "inputs": {"source_sentence": "a", "sentences": ["b"]}},
        ),
    ],
)
def test_the_root_does_what_the_model_is_for(post, path, body):
    assert post("/", **body) == post(path, **body)


def test_the_root_names_wrong_values_as_the_other_paths_do(refusal):
    body = {"model": "embedder", "inputs": 5}

    assert refusal("/", **body) == refusal("/embed", **body)


def test_an_answer_for_each_token_has_no_numbers_that_json_does_not_have(send, monkeypatch):
    monkeypatch.setattr(
        "tests.client.gateway.fake_models.vector_of", lambda row: np.float32([np.nan, 1.5])
    )

    response = send("POST", "/embed_all", {"model": "tokens", "inputs": "a"})

    assert json.loads(response.text) == [[[None, 1.5]]]


def test_labels_of_a_text_are_as_by_tei(post):
    answer = post("/", model="classifier", inputs="a")

    assert answer[0] == {"score": score_of("a"), "label": "best"}


def test_a_long_answer_of_embed_all_is_written_in_pieces(post, monkeypatch):
    whole = post("/embed_all", model="tokens", inputs=["abcdef", "g"])

    monkeypatch.setattr(tei, "_NUMBERS_AT_ONCE", 1)

    assert post("/embed_all", model="tokens", inputs=["abcdef", "g"]) == whole
