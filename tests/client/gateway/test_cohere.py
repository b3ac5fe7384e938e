"""`/v2/embed` and `/v1/embed` of the gateway."""

import base64

import numpy as np
import pytest

from .fake_models import vector_of

TEXTS = ["ab", "c"]
VECTORS = np.stack([vector_of(text) for text in TEXTS])
BODY = {"model": "embedder", "texts": TEXTS, "input_type": "search_query"}
CUT = {"truncate": True, "truncation_side": "right"}


def test_an_answer_has_coheres_form(post, calls):
    answer = post("/v2/embed", **BODY)

    assert len(answer.pop("id")) == 32
    np.testing.assert_array_equal(np.float32(answer.pop("embeddings")["float"]), VECTORS)
    assert answer == {
        "response_type": "embeddings_by_type",
        "texts": TEXTS,
        "meta": {"billed_units": {"input_tokens": 3}},
    }
    # Cohere cuts by default
    assert calls.received == [("embedder", "embed", TEXTS, {"input_type": "search_query", **CUT})]


def test_vectors_have_each_requested_type(post):
    found = post("/v2/embed", **BODY, embedding_types=["float", "base64"])["embeddings"]

    np.testing.assert_array_equal(np.float32(found["float"]), VECTORS)
    raw = [np.frombuffer(base64.b64decode(each), "<f4") for each in found["base64"]]
    np.testing.assert_array_equal(np.stack(raw), VECTORS)


def test_older_clients_get_a_list_unless_they_name_types(post, calls):
    calls.counts_tokens = False

    answer = post("/v1/embed", model="embedder", texts=TEXTS)
    typed = post("/v1/embed", model="embedder", texts=TEXTS, embedding_types=["float"])

    np.testing.assert_array_equal(np.float32(answer["embeddings"]), VECTORS)
    assert typed["embeddings"] == {"float": answer["embeddings"]}
    assert [answer["response_type"], typed["response_type"]] == [
        "embeddings_floats",
        "embeddings_by_type",
    ]
    assert "meta" not in answer
    assert calls.received[0][3] == CUT


def test_inputs_may_be_objects(post, calls):
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]

    post("/v2/embed", model="embedder", inputs=inputs, input_type="clustering")

    assert calls.received[0][2] == TEXTS


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"truncate": "NONE"}, {}),
        ({"truncate": "START"}, {"truncate": True, "truncation_side": "left"}),
        ({"output_dimension": 2}, {"dimensions": 2, **CUT}),
    ],
    ids=["none", "start", "dimension"],
)
def test_options_have_coheres_names(post, calls, options, expected):
    post("/v2/embed", **BODY, **options)

    assert calls.received[0][3] == {"input_type": "search_query", **expected}


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({"input_type": None}, "input_type", "input_type: Field required"),
        ({"input_type": "image"}, "input_type", "input_type is 'image'"),
        ({"texts": None}, None, "the request has neither texts nor inputs; send one of them"),
        ({"texts": []}, "texts", "texts is []"),
        ({"texts": ["a"] * 2049}, "texts", "2048"),
        ({"embedding_types": ["float", "int8"]}, "embedding_types.1", "'float' or 'base64'"),
        ({"images": ["data:"]}, "images", "images is not supported"),
        ({"images": [{}]}, "images", "that are no text are not served"),
        ({"truncate": True}, "truncate", "'NONE', 'START' or 'END'"),
        (
            {"inputs": [{"content": [{"type": "image_url", "image_url": {}}]}]},
            "inputs.0.content.0.type",
            "Input should be 'text'",
        ),
    ],
    ids="no-type image no-texts empty many int8 images objects truncate image-input".split(),
)
def test_what_is_not_served_is_refused_by_name(refusal, calls, body, param, message):
    status, error = refusal("/v2/embed", **BODY | body)

    assert (status, error["param"]) == (400, param)
    assert message in error["message"]
    assert calls.received == []
