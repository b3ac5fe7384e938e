"""`/info` of the gateway."""

from importlib.metadata import version

import pytest


@pytest.mark.parametrize(
    "model, kind",
    [
        ("embedder", {"embedding": {}}),
        ("sparse", {"embedding": {"pooling": "splade"}}),
        ("ranker", {"reranker": {}}),
        ("classifier", {"classifier": {}}),
        ("writer", None),
    ],
)
def test_a_model_is_described_by_its_config(send, calls, model, kind):
    calls.settings = {"dtype": "bf16", "max_sequence_tokens": "256", "max_batch_tokens": "4096"}

    assert send("GET", f"/info?model={model}").json() == {
        "model_id": model,
        "model_dtype": "bfloat16",
        "model_type": kind,
        "max_concurrent_requests": 2048,
        "max_input_length": 256,
        "max_batch_tokens": 4096,
        "max_batch_requests": None,
        "max_client_batch_size": 2048,
        "auto_truncate": True,
        "version": version("varlen-client"),
    }


def test_a_model_that_labels_tokens_is_no_classifier_of_texts(send):
    assert send("GET", "/info?model=tagger").json()["model_type"] is None


def test_what_the_checkpoint_decides_is_null(send, make_app):
    info = send("GET", "/info", app=make_app(model="embedder")).json()

    assert (info["model_dtype"], info["max_input_length"]) == (None, None)


def test_a_model_that_is_not_there_is_not_found(send):
    assert send("GET", "/info?model=missing").status_code == 404
