"""`/classify` and `/pooling` of vLLM."""

import base64

import numpy as np
import pytest

from .fake_models import score_of, tokens_of, vector_of

TEXTS = ["ab", "c"]
IDS = [[1, 7], [1, 8]]


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classify_has_the_scores_of_all_labels(post, calls, path):
    answer = post(path, model="classifier", input=TEXTS)

    assert answer["id"].startswith("classify-")
    assert (answer["object"], answer["model"]) == ("list", "classifier")
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    for index, (each, text) in enumerate(zip(answer["data"], TEXTS, strict=True)):
        assert each == {
            "index": index,
            "label": "best",
            "probs": [pytest.approx(score_of(text)), -9],
            "num_classes": 2,
        }
    assert calls.received == [("classifier", "classify", TEXTS, {"activation": "auto"})]


@pytest.mark.parametrize(
    "fields, options",
    [
        ({"use_activation": False}, {"activation": "none"}),
        ({"use_activation": "true"}, {"activation": "auto"}),
        ({"cache_salt": "a"}, {"activation": "auto", "cache_salt": "a"}),
        (
            {"truncate_prompt_tokens": -1},
            {"activation": "auto", "truncate": True},
        ),
    ],
)
def test_classify_passes_options_on(post, calls, fields, options):
    post("/classify", model="classifier", input="ab", **fields)

    assert calls.received[-1][3].items() >= options.items()


def test_classify_takes_token_ids(post, calls):
    answer = post("/classify", model="classifier", input=IDS)

    assert [each["probs"][0] for each in answer["data"]] == pytest.approx(list(map(score_of, IDS)))
    assert calls.received[-1][2] == IDS


@pytest.mark.parametrize(
    "model, task, method, arrays",
    [
        ("embedder", "embed", "embed", [vector_of(text) for text in TEXTS]),
        ("tokens", "token_embed", "token_embed", [tokens_of(text) for text in TEXTS]),
        ("several", "embed", "embed", [vector_of(text) for text in TEXTS]),
        ("states", "token_embed", "hidden", [tokens_of(text) for text in TEXTS]),
        ("tagger", "token_classify", "token_classify", [tokens_of(text) for text in TEXTS]),
        ("classifier", "classify", "classify", [np.float32([score_of(t), -9]) for t in TEXTS]),
    ],
)
@pytest.mark.parametrize("names_task", [True, False])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_pooling_returns_what_the_model_gives(
    post, calls, model, task, method, arrays, names_task, encoding
):
    fields = {"task": task} if names_task else {}

    answer = post("/pooling", model=model, input=TEXTS, encoding_format=encoding, **fields)

    assert answer["id"].startswith("pool-")
    assert answer["usage"]["prompt_tokens"] == 3
    for index, (each, array) in enumerate(zip(answer["data"], arrays, strict=True)):
        assert (each["index"], each["object"]) == (index, "pooling")
        found = each["data"]
        if encoding == "base64":
            found = np.frombuffer(base64.b64decode(found), "<f4").reshape(array.shape)
        np.testing.assert_array_equal(np.float32(found), array)
    assert calls.received[-1][1] == method


def test_the_task_chooses_one_of_several_outputs(post):
    answer = post("/pooling", model="several", input="ab", task="token_embed")

    np.testing.assert_array_equal(np.float32(answer["data"][0]["data"]), tokens_of("ab"))


@pytest.mark.parametrize(
    "model, fields, options",
    [
        ("embedder", {"dimensions": "2"}, {"dimensions": 2}),
        ("embedder", {"normalize": False}, {"normalize": False}),
        ("embedder", {"use_activation": False}, {"normalize": False}),
        ("tokens", {"use_activation": True}, {"normalize": True}),
        ("classifier", {"use_activation": False}, {"activation": "none"}),
        ("tagger", {"cache_salt": "a"}, {"cache_salt": "a"}),
        ("embedder", {"input": IDS}, {}),
    ],
)
def test_pooling_passes_options_on(post, calls, model, fields, options):
    post("/pooling", **{"model": model, "input": "ab", **fields})

    assert calls.received[-1][3].items() >= options.items()


@pytest.mark.parametrize(
    "model, fields, message",
    [
        ("embedder", {"task": "classify"}, "'embedder' has the task embed: leave task out"),
        ("several", {"task": "classify"}, "the tasks embed, token_embed: send one of them"),
        ("embedder", {"task": "plugin"}, "task is 'plugin': Input should be"),
        ("sparse", {}, "'sparse' has indices, values"),
        ("writer", {}, "pooling needs one of sentence_embedding, token_embeddings"),
        ("tokens", {"dimensions": 2}, "dimensions is not for the task token_embed"),
        ("states", {"use_activation": True}, "use_activation is not for the task token_embed"),
        ("classifier", {"normalize": True}, "normalize is not for the task classify"),
        ("embedder", {"normalize": True, "use_activation": True}, "normalize and use_activation"),
        ("embedder", {"input": []}, "input has 0 rows"),
        ("embedder", {"messages": [{}]}, "messages is not supported: write texts"),
        ("embedder", {"input": [7, 8]}, "row 0: the token ids are not 1 (<s>)"),
    ],
)
def test_pooling_refuses_what_the_model_does_not_give(refusal, model, fields, message):
    status, error = refusal("/pooling", **{"model": model, "input": "ab", **fields})

    assert status == 400
    assert message in error["message"]


def test_an_answer_of_tokens_has_a_limit(refusal, monkeypatch):
    monkeypatch.setattr("varlen_client.gateway.tei.MAX_TOKEN_FEATURES", 12)

    _, error = refusal("/pooling", model="tokens", input=["ab", "é"])

    assert error["message"].startswith("input has 4 bytes of text or token ids; allowed: up to 3")
