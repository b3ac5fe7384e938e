"""Bodies are counted before they are parsed, and wrong ones have few errors."""

import json
import random

import pytest
from pydantic import ValidationError

from varlen_client.errors import InvalidRequest
from varlen_client.gateway import json_io
from varlen_client.gateway.bodies import MAX_FIELDS
from varlen_client.gateway.embeddings import CohereBody, EmbeddingsBody
from varlen_client.gateway.generation import MAX_MESSAGES, ChatBody, CompletionsBody
from varlen_client.gateway.json_io import (
    MAX_IDS,
    MAX_NAMES,
    MAX_VALUES,
    SMALL_BYTES,
    JsonSize,
    read_json,
    size_of,
)
from varlen_client.gateway.ranks import ScoreBody
from varlen_client.gateway.sampling import MAX_BIASED_TOKENS
from varlen_client.gateway.tei import PredictBody
from varlen_client.gateway.tokens import DecodeBody, DetokenizeBody, TokenizeBody

EMBEDDINGS, CHAT = "/v1/embeddings", "/v1/chat/completions"


def random_text(rng):
    return "".join(rng.choice('\\\\"",:[{}] aé\n') for _ in range(rng.randrange(8)))


def random_value(rng, level=0):
    """Return a JSON value whose texts are full of brackets, quotes and backslashes."""
    kind = rng.random() if level < 5 else 1.0
    if kind < 0.3:
        return [random_value(rng, level + 1) for _ in range(rng.randrange(5))]
    if kind < 0.5:
        return {random_text(rng): random_value(rng, level + 1) for _ in range(rng.randrange(4))}
    return rng.choice([1, None, True, random_text(rng), 1.5])


def counted(value):
    """Return the size of a value: brackets that open, and commas."""
    if not isinstance(value, (list, dict)):
        return JsonSize(0, 0)
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    values = 1 + max(len(value) - 1, 0) + sum(each.values for each in inner)
    names = len(value) if isinstance(value, dict) else 0
    return JsonSize(values, names + sum(each.names for each in inner))


@pytest.mark.parametrize("piece", [1, 2, 7, 4096])
def test_values_and_names_outside_of_texts_are_counted_whatever_the_pieces(monkeypatch, piece):
    monkeypatch.setattr(json_io, "_PIECE_BYTES", piece)
    rng = random.Random(piece)
    for _ in range(300):
        value = random_value(rng)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()

        assert size_of(body) == counted(value), body


@pytest.mark.parametrize("body", [b"", b"\\", b'"\\', b"]]]", b"\xff,", b'"' * 5])
def test_what_is_no_json_is_counted_too(body):
    assert size_of(body).values <= len(body)


@pytest.mark.parametrize(
    "body, message",
    [
        (b"[" * 100_000, "the body has more than 200 levels of objects and lists; send fewer"),
        (b"1" * 5000, "the body is not JSON: number out of range"),
        (b'"\xff"', "the body cannot be read; send JSON in UTF-8"),
        (b'{"a": 1,}', "the body is not JSON: "),
    ],
    ids=["levels", "number", "latin", "comma"],
)
def test_what_cannot_be_read_is_refused_with_its_reason(body, message):
    with pytest.raises(InvalidRequest) as refused:
        read_json(body)

    assert str(refused.value).startswith(message)


def large(path, **fields):
    """Return a body that is counted, with a model for its path."""
    model = "writer" if path == CHAT else "embedder"
    return json.dumps({"model": model, "user": "x" * SMALL_BYTES, **fields}).encode()


def refused_message(send, path, body):
    headers = {"Content-Type": "application/json"}
    response = send("POST", path, content=body, headers=headers)
    assert response.status_code == 400
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path, fields, message",
    [
        (
            CHAT,
            {"messages": [{}] * MAX_VALUES},
            f"the body has {2 * MAX_VALUES + 3} values; allowed: up to {MAX_VALUES}, so send fewer",
        ),
        (
            EMBEDDINGS,
            {"input": [1] * (MAX_IDS + MAX_VALUES)},
            f"the body has {MAX_IDS + MAX_VALUES + 3} values; allowed: up to {MAX_IDS + MAX_VALUES}",
        ),
        (
            EMBEDDINGS,
            {"input": [1] * (MAX_IDS + 1)},
            f"input has {MAX_IDS + 1} values; allowed: up to {MAX_IDS}, so send fewer at once",
        ),
        (
            EMBEDDINGS,
            {"input": [1] * 10, "metadata": {"a": [1] * (MAX_VALUES + 7)}},
            f"the body has {MAX_VALUES + 12} values besides input; allowed: up to {MAX_VALUES}",
        ),
        (
            EMBEDDINGS,
            {"metadata": {str(each): 1 for each in range(MAX_NAMES)}},
            f"the body has {MAX_NAMES + 3} names of fields; allowed: up to {MAX_NAMES}",
        ),
        (EMBEDDINGS, {"input": ["a"] * 3000}, "input has 3000 rows; allowed: 1 to 2048"),
    ],
    ids="values all-ids ids besides names rows".split(),
)
def test_a_body_of_very_many_values_is_refused_by_their_number(send, calls, path, fields, message):
    found = refused_message(send, path, large(path, **fields))

    assert found.startswith(message)
    assert calls.received == []


def test_token_ids_up_to_the_limit_are_served(send, calls):
    rows = [[1] * (MAX_IDS // 1024)] * 1024
    headers = {"Content-Type": "application/json"}

    response = send("POST", EMBEDDINGS, content=large(EMBEDDINGS, input=rows), headers=headers)

    assert response.status_code == 200
    assert calls.received[-1][2] == rows


def test_large_bodies_are_read_in_the_thread_and_small_ones_are_not(send, monkeypatch):
    read = []

    async def in_thread(call):
        read.append(call)
        return call()

    monkeypatch.setattr(json_io, "in_thread", in_thread)
    headers = {"Content-Type": "application/json"}
    small = json.dumps({"model": "embedder", "input": "a"}).encode()
    for body in (small, large(EMBEDDINGS, input="a")):
        assert send("POST", EMBEDDINGS, content=body, headers=headers).status_code == 200

    assert len(read) == 1


MANY = 3000
WRONG = [
    (ChatBody, {"messages": [{}] * MANY}),
    (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatBody, {"messages": [], "stop": [None] * MANY}),
    (ChatBody, {"messages": [], "tools": [{}] * MANY}),
    (ChatBody, {"messages": [], "modalities": ["audio"] * MANY}),
    (CompletionsBody, {"prompt": [None] * 2048}),
    (CompletionsBody, {"prompt": "a", "bad_words": [1] * MANY, "stop_token_ids": [""] * MANY}),
    (CompletionsBody, {"prompt": "a", "guided_choice": [1] * MANY}),
    (CompletionsBody, {"prompt": "a", "logit_bias": {str(each): "" for each in range(MANY)}}),
    (EmbeddingsBody, {"input": [[None]] * 2048}),
    (EmbeddingsBody, {"input": "a", **{str(each): 1 for each in range(MANY)}}),
    (CohereBody, {"texts": [None] * 2048, "inputs": [{}] * 2048}),
    (CohereBody, {"texts": [""], "embedding_types": [""] * MANY}),
    (PredictBody, {"inputs": [[]] * MANY + [None]}),
    (PredictBody, {"inputs": [[None]] * MANY}),
    (ScoreBody, {"text_1": [None] * MANY, "documents": [[]] * MANY}),
    (TokenizeBody, {"inputs": [None] * MANY}),
    (DetokenizeBody, {"tokens": [None] * MANY}),
    (DecodeBody, {"ids": [[None]] * 2048}),
]


@pytest.mark.parametrize("form, body", WRONG, ids=lambda each: None)
def test_a_wrong_body_has_few_errors_however_many_values_are_wrong(form, body):
    with pytest.raises(ValidationError) as refused:
        form.model_validate(body)

    # a field of several types has an error for each of them
    assert refused.value.error_count() <= 10


@pytest.mark.parametrize(
    "fields, message",
    [
        ({str(each): 1 for each in range(MAX_FIELDS)}, f"allowed: up to {MAX_FIELDS}"),
        (
            {"logit_bias": dict.fromkeys(map(str, range(MAX_BIASED_TOKENS + 1)), 1.0)},
            f"the object has {MAX_BIASED_TOKENS + 1} fields; allowed: up to {MAX_BIASED_TOKENS}",
        ),
        (
            {"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)},
            f"at most {MAX_MESSAGES} items",
        ),
        ({"n": 1.5}, "n is 1.5: Input should be a valid integer"),
        ({"stream": "maybe"}, "stream is 'maybe': Input should be a valid boolean"),
        ({"temperature": "hot"}, "temperature is 'hot': Input should be a valid number"),
    ],
    ids="fields bias messages bool text number".split(),
)
def test_too_many_fields_and_values_of_other_types_are_refused(refusal, calls, fields, message):
    body = {"model": "writer", "messages": [{"role": "user", "content": "a"}]} | fields

    status, error = refusal(CHAT, **body)

    assert (status, calls.received) == (400, [])
    assert message in error["message"]


LONG = "x" * 50_000


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("POST", "/v2/models/embedder/infer", {"parameters": {LONG: 1}}),
        ("POST", EMBEDDINGS, {"model": LONG, "input": "a"}),
        ("POST", f"{EMBEDDINGS}?model={LONG}", {"model": "embedder", "input": "a"}),
        ("POST", EMBEDDINGS, {"model": "embedder", "input": "a", "encoding_format": LONG}),
        (
            "POST",
            "/v2/models/embedder/infer",
            {
                "inputs": [
                    {"name": "text", "datatype": "BYTES", "shape": [1] * 10_000, "data": ["a"]}
                ]
            },
        ),
        (
            "POST",
            f"/v2/models/{LONG}/infer",
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]},
        ),
        ("GET", f"/v1/models/{LONG}", None),
        ("GET", f"/{LONG}", None),
    ],
    ids="field model query value shape infer model-path path".split(),
)
def test_an_error_does_not_repeat_long_texts_of_the_client(send, method, path, body):
    response = send(method, path, body)

    assert response.status_code in (400, 404)
    assert len(response.content) < 5000


def test_a_type_of_vectors_that_is_there_twice_is_written_once(post):
    body = {"texts": ["a"], "input_type": "classification"}

    answer = post("/v2/embed?model=embedder", **body, embedding_types=["float", "float"])

    assert answer["embeddings"].keys() == {"float"}
    assert len(answer["embeddings"]["float"]) == 1
