"""Fields of requests that are unknown, or not served."""

import math

import pytest

from varlen_client.gateway import unserved_fields
from varlen_client.gateway.metrics import MAX_IGNORED_NAMES
from varlen_client.gateway.unserved_fields import Unserved

MESSAGES = [{"role": "user", "content": "a"}]
TENSOR = {"name": "input_text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
# A body of each POST route.
BODIES = {
    "/v1/embeddings": {"model": "embedder", "input": "a"},
    "/infinity/embeddings": {"model": "embedder", "input": "a"},
    "/v1/embed": {"model": "embedder", "texts": ["a"]},
    "/v2/embed": {"model": "embedder", "texts": ["a"], "input_type": "search_query"},
    "/rerank": {"model": "ranker", "query": "a", "texts": ["b"]},
    "/v1/rerank": {"model": "ranker", "query": "a", "documents": ["b"]},
    "/v2/rerank": {"model": "ranker", "query": "a", "documents": ["b"]},
    "/infinity/rerank": {"model": "ranker", "query": "a", "documents": ["b"]},
    "/score": {"model": "ranker", "text_1": "a", "text_2": "b"},
    "/v1/score": {"model": "ranker", "text_1": "a", "text_2": "b"},
    "/classify": {"model": "classifier", "input": "a"},
    "/v1/classify": {"model": "classifier", "input": "a"},
    "/v1/extract": {"model": "embedder", "text": "a", "labels": ["person"]},
    "/pooling": {"model": "embedder", "input": "a"},
    "/embed": {"model": "embedder", "inputs": "a"},
    "/embed_sparse": {"model": "sparse", "inputs": "a"},
    "/embed_all": {"model": "tokens", "inputs": "a"},
    "/similarity": {
        "model": "embedder",
        "inputs": {"source_sentence": "a", "sentences": ["b"]},
    },
    "/predict": {"model": "classifier", "inputs": "a"},
    "/": {"model": "embedder", "inputs": "a"},
    "/tokenize": {"model": "embedder", "inputs": "a"},
    "/decode": {"model": "embedder", "ids": [97]},
    "/detokenize": {"model": "embedder", "tokens": [97]},
    "/v1/completions": {"model": "writer", "prompt": "a"},
    "/v1/responses": {"model": "writer", "input": "a"},
    "/v1/chat/completions": {"model": "writer", "messages": MESSAGES},
    "/v2/models/embedder/infer": {"inputs": [TENSOR]},
}
# Values of unknown fields, as clients send them.
VALUES = {"drop_params": True, "return_len": "true", "extra_body": {"a": [1]}, "seed_": math.pi}
# Objects inside of bodies: a count of ignored fields, the path, and fields of the body.
NESTED = [
    ("document.id", "/v1/rerank", {"documents": [{"text": "b", "id": 7}, {"text": "c", "id": 8}]}),
    ("document.id", "/rerank", {"texts": [{"text": "b", "id": 7}]}),
    ("top_k", "/embed", {"parameters": {"top_k": 1}}),
    ("options.dtype", "/embed", {"options": {"dtype": "bf16"}}),
    (
        "input.id",
        "/v2/embed",
        {"texts": None, "inputs": [{"id": 1, "content": [{"type": "text", "text": "a"}]}]},
    ),
    ("input.parameters", "/v2/models/embedder/infer", {"inputs": [TENSOR | {"parameters": {}}]}),
]


def without_ids(answer):
    """Return an answer without what differs between two answers."""
    if not isinstance(answer, dict):
        return answer
    # of /v1/responses
    items = [{**item, "id": ""} for item in answer.get("output", ())]
    return {**answer, "id": "", "created": 0, "created_at": 0, "output": items}


@pytest.fixture
def app(make_app):
    return make_app()


@pytest.fixture
def ignored(send, app):
    """Return a function that returns the counts of ignored fields."""

    def ignored():
        lines = send("GET", "/metrics", app=app).text.splitlines()
        head = "varlen_gateway_ignored_fields_total{field="
        found = [line.removeprefix(head).split("} ") for line in lines if line.startswith(head)]
        return {name.strip('"'): float(count) for name, count in found}

    return ignored


def test_the_table_has_every_route_with_a_body(make_app):
    paths = make_app().openapi()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}

    assert posts == {path.replace("embedder", "{name}") for path in BODIES}


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_change_no_answer(post, calls, path):
    expected = post(path, **BODIES[path])

    assert without_ids(post(path, **BODIES[path], **VALUES)) == without_ids(expected)
    assert calls.received[0] == calls.received[-1]


@pytest.mark.parametrize("path", BODIES)
def test_strict_refuses_unknown_fields_by_name(make_app, send, calls, path):
    response = send("POST", path, {**BODIES[path], "drop_params": True}, app=make_app(strict=True))

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "drop_params")
    assert error["message"] == "drop_params is no field of this object; leave it out"
    assert calls.received == []


@pytest.mark.parametrize("name, path, fields", NESTED)
def test_unknown_fields_of_nested_objects_are_ignored(send, app, ignored, name, path, fields):
    response = send("POST", path, BODIES[path] | fields, app=app)

    assert response.status_code == 200, response.text
    assert ignored() == {name: 1}


def test_each_name_is_counted_once_a_request_and_logged_once(send, app, ignored, caplog):
    for _ in range(3):
        send("POST", "/embed", BODIES["/embed"] | {"drop_params": True, "opts": {}}, app=app)

    assert ignored() == {"drop_params": 3, "opts": 3}
    assert sorted(
        each.getMessage() for each in caplog.records if each.name == "varlen.gateway"
    ) == [
        f"requests have the field {name}, which is not served and ignored"
        for name in ("drop_params", "opts")
    ]


def test_a_refused_request_counts_no_fields(send, app, ignored):
    send("POST", "/embed", BODIES["/embed"] | {"opts": {}, "dimensions": "x"}, app=app)

    assert ignored() == {}


def test_hostile_names_fill_neither_the_metrics_nor_the_log(send, app, ignored, caplog):
    odd = {'a"b': 1, "a\nb": 1, "x" * 100_000: 1, "é": 1, "": 1}
    for begin in range(0, 1000, 200):
        names = {f"name_{each}": 1 for each in range(begin, begin + 200)}
        assert send("POST", "/embed", BODIES["/embed"] | odd | names, app=app).status_code == 200

    counts = ignored()
    assert counts.pop("other") == 5
    assert len(counts) == MAX_IGNORED_NAMES
    assert all(name.startswith("name_") for name in counts)
    assert len([each for each in caplog.records if each.name == "varlen.gateway"]) == len(counts)


def test_parameters_of_kserve_are_refused_with_the_nearest_name(refusal, calls):
    path = "/v2/models/embedder/infer"

    status, error = refusal(path, **BODIES[path], parameters={"truncatoin_side": "left"})

    assert (status, error["param"]) == (400, "parameters.truncatoin_side")
    message = "parameters.truncatoin_side is no field of this object; write truncation_side"
    assert error["message"] == message
    assert calls.received == []


@pytest.mark.parametrize("given, read", [(value, True) for value in ("true", "on", 1, 1.0, True)])
def test_truth_values_are_read_as_by_pydantic(post, given, read):
    answer = post("/v1/rerank", **BODIES["/v1/rerank"], return_documents=given)

    assert all(("document" in each) is read for each in answer["results"])


@pytest.mark.parametrize("given", ["2", 2.0, 2, "2.0"])
def test_integers_are_read_as_by_pydantic(post, given):
    answer = post("/v1/embeddings", **BODIES["/v1/embeddings"], dimensions=given)

    assert len(answer["data"][0]["embedding"]) == 2


@pytest.mark.parametrize(
    "value, is_refused", [(True, False), ("true", False), (False, True), ("false", True)]
)
def test_a_field_that_is_true_by_default_may_be_true(send, value, is_refused):
    body = BODIES["/v1/rerank"] | {"add_special_tokens": value}

    assert send("POST", "/v1/rerank", body).status_code == (400 if is_refused else 200)


def test_of_several_refused_fields_the_first_is_named(refusal):
    fields = {"return_embeddings": "a", "rank_fields": ["b"], "top_k": 1}
    for names in (list(fields), list(fields)[::-1]):
        body = {name: fields[name] for name in names}

        assert refusal("/v1/rerank", **BODIES["/v1/rerank"], **body)[1]["param"] == names[0]


@pytest.mark.parametrize("value", [None, False, "", [], {}, "false"])
def test_empty_values_of_unserved_fields_ask_for_nothing(post, value):
    assert post("/v1/rerank", **BODIES["/v1/rerank"], rank_fields=value)


TABLES = {
    name: table
    for name, table in vars(unserved_fields).items()
    if isinstance(table, dict) and all(isinstance(each, Unserved) for each in table.values())
}
# Tables of whole bodies.
ROUTES = {
    "GENERATION": "/v1/completions",
    "COMPLETIONS": "/v1/completions",
    "CHATS": "/v1/chat/completions",
    "RESPONSES": "/v1/responses",
    "TOKENIZATION": "/tokenize",
    "TEXTS": "/predict",
    "EMBEDDINGS": "/v1/embeddings",
    "PROMPTS": "/embed_sparse",
    "COHERE": "/v1/embed",
    "RANKS": "/v1/rerank",
    # nested: tests/client/gateway/test_fields.py
    "MESSAGES": None,
    "PARTS": None,
}


@pytest.mark.parametrize(
    "table, name",
    [(table, name) for table in TABLES for name in TABLES[table] if ROUTES.get(table)],
)
def test_unserved_fields_are_refused_with_their_reason(refusal, post, calls, table, name):
    path, field = ROUTES[table], TABLES[table][name]
    for value in field.allowed:
        post(path, **BODIES[path], **{name: value})
    calls.received.clear()

    status, error = refusal(path, **BODIES[path], **{name: "something"})

    assert (status, error["param"]) == (400, name)
    assert error["message"] == f"{name} is not supported: {field.reason}"
    assert calls.received == []
