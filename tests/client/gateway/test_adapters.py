"""Requests name adapters in the ways of other servers; unknown names are refused."""

import pytest

from varlen_client.errors import InvalidRequest
from varlen_client.gateway import models
from varlen_client.wire import ModelState

CHAT = [{"role": "user", "content": "Hi"}]
PAIRS = {"query": "q", "documents": ["a", "b"]}
# a path, a body without its model, and the model
ROUTES = [
    ("/v1/embeddings", {"input": "a"}, "embedder"),
    ("/infinity/embeddings", {"input": "a"}, "embedder"),
    ("/v1/embed", {"texts": ["a"]}, "embedder"),
    ("/v2/embed", {"texts": ["a"], "input_type": "search_query"}, "embedder"),
    ("/v1/completions", {"prompt": "a"}, "writer"),
    ("/v1/completions", {"prompt": "a", "stream": True}, "writer"),
    ("/v1/chat/completions", {"messages": CHAT}, "writer"),
    ("/v1/rerank", PAIRS, "ranker"),
    ("/v2/rerank", PAIRS, "ranker"),
    ("/infinity/rerank", PAIRS, "ranker"),
    ("/rerank", {"query": "q", "texts": ["a", "b"]}, "ranker"),
    ("/v1/score", {"text_1": "a", "text_2": "b"}, "ranker"),
    ("/v1/score", {"text_1": "a", "text_2": "b"}, "embedder"),
    ("/classify", {"input": "a"}, "classifier"),
    ("/pooling", {"input": "a"}, "embedder"),
    ("/pooling", {"input": "a"}, "tagger"),
    ("/embed", {"inputs": "a"}, "embedder"),
    ("/embed_sparse", {"inputs": "a"}, "sparse"),
    ("/embed_all", {"inputs": "a"}, "states"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "embedder"),
    ("/predict", {"inputs": "a"}, "classifier"),
    ("/predict", {"inputs": "a", "parameters": {"candidate_labels": ["x", "y"]}}, "classifier"),
    ("/predict", {"inputs": "a"}, "tagger"),
    ("/", {"inputs": "a"}, "embedder"),
    ("/", {"inputs": {"question": "q", "context": "abc"}}, "answerer"),
]


@pytest.fixture(autouse=True)
def adapters(calls):
    """Two models have the same adapter, and one has another one; all are of varlen."""
    calls.adapters = {
        state.name: {"legal": "", "mail": "", "cut": "damaged"} for state in calls.states
    }
    return calls.adapters


def adapter_of(calls):
    """Return the adapter of the only request."""
    [(_, _, _, options)] = calls.received
    return options.get("adapter")


@pytest.mark.parametrize("path, body, model", ROUTES, ids=str)
def test_every_route_takes_an_adapter_behind_the_name_of_its_model(send, calls, path, body, model):
    response = send("POST", path, {**body, "model": f"{model}:legal"})

    assert response.status_code == 200, response.text
    assert [call[0] for call in calls.received] == [model]
    assert adapter_of(calls) == "legal"


@pytest.mark.parametrize("path, body, model", ROUTES, ids=str)
@pytest.mark.parametrize("field", ["adapter", "lora_path"])
def test_every_route_takes_an_adapter_in_a_field(send, calls, path, body, model, field):
    response = send("POST", f"{path}?model={model}", {**body, field: "mail"})

    assert response.status_code == 200, response.text
    assert adapter_of(calls) == "mail"


def test_a_request_to_kserve_names_it_in_its_path_or_parameters(send, calls):
    tensor = {"name": "input_text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    named = "/v2/models/embedder:legal/infer", {"inputs": [tensor]}
    given = "/v2/models/embedder/infer", {"inputs": [tensor], "parameters": {"adapter": "legal"}}
    for path, body in (named, given):
        response = send("POST", path, body)
        assert response.status_code == 200, response.text
        assert adapter_of(calls) == "legal"
        calls.received.clear()


def test_answers_have_the_name_by_which_a_request_may_ask_again(post, calls, adapters):
    adapters["writer"] = {"poems": ""}

    for name in ("writer:poems", "poems"):
        assert post("/v1/completions", model=name, prompt="a")["model"] == "writer:poems"
    assert {call[3]["adapter"] for call in calls.received} == {"poems"}


def test_an_adapter_of_several_models_needs_the_name_of_one(refusal):
    status, error = refusal("/v1/embeddings", model="legal", input="a")

    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"].startswith("several models have the adapter 'legal'; write one of ")
    assert "embedder:legal" in error["message"]


@pytest.mark.parametrize("name", ["embedder:other", "embedder:"])
def test_an_unknown_adapter_is_refused_with_the_ones_that_there_are(refusal, calls, name):
    status, error = refusal("/v1/embeddings", model=name, input="a")

    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"] == (
        f"the model 'embedder' has no adapter {name[9:]!r}; write one of embedder:legal, embedder:mail"
    )
    assert not calls.received


def test_a_model_without_adapters_says_so(refusal, calls, adapters):
    for names in ({}, {"cut": "damaged"}):
        adapters["embedder"] = names
        _, error = refusal("/v1/embeddings", model="embedder:other", input="a")
        assert error["message"].endswith("has no adapter 'other'; it has none: leave it out")
    # a model of another backend is not asked
    del adapters["embedder"]
    calls.asked_adapters.clear()
    _, error = refusal("/v1/embeddings", model="embedder:other", input="a")
    assert error["message"].endswith("it has none: leave it out")
    assert not calls.asked_adapters


def test_the_server_says_why_it_does_not_serve_a_damaged_one(post, calls):
    post("/v1/embeddings", model="embedder:cut", input="a")

    assert adapter_of(calls) == "cut"


def test_where_names_are_not_known_the_server_decides(post, calls, adapters):
    adapters["embedder"] = InvalidRequest("operation is adapters; allowed: tokenize")

    post("/v1/embeddings", model="embedder:any", input="a")

    assert adapter_of(calls) == "any"


def test_a_model_whose_own_name_has_a_colon(post, refusal, calls, adapters):
    calls.states.append(ModelState("embedder:legal", "1", "READY"))
    adapters["embedder:legal"] = {"mail": ""}

    assert post("/v1/embeddings", model="embedder:legal", input="a")["model"] == "embedder:legal"
    assert (calls.received[-1][0], adapter_of(calls)) == ("embedder:legal", None)
    calls.received.clear()
    post("/v1/embeddings", model="embedder:legal:mail", input="a")
    assert (calls.received[-1][0], adapter_of(calls)) == ("embedder:legal", "mail")
    _, error = refusal("/v1/embeddings", model="embedder:legal:legal", input="a")
    assert "'embedder:legal' has no adapter 'legal'" in error["message"]


@pytest.mark.parametrize(
    "path, body, message",
    [
        (
            "/v1/embeddings",
            {"model": "embedder:legal", "adapter": "mail"},
            "the request has the adapter 'mail', and 'legal' in the name of its model; send one of them",
        ),
        (
            "/v1/embeddings",
            {"model": "embedder", "adapter": "mail", "lora_path": "legal"},
            "lora_path and adapter are two names of one field; send one",
        ),
        (
            "/v1/embeddings?model=embedder:legal",
            {"model": "embedder:mail"},
            "the request has the model 'embedder:mail', and 'embedder:legal' in its query; send one of them",
        ),
        (
            "/v1/completions",
            {"model": "writer", "lora": [{"id": 0, "scale": 0.5}]},
            "lora is not supported: write the name of one adapter in adapter, or MODEL:ADAPTER in model",
        ),
        (
            "/v1/embeddings",
            {"model": "embedder", "adapter_id": "org/legal"},
            "adapter_id is not supported: write the name of one adapter in adapter, or MODEL:ADAPTER in model",
        ),
    ],
)
def test_what_names_two_adapters_or_none_that_can_be_chosen_is_refused(
    refusal, path, body, message
):
    text = {"prompt": "a"} if path.endswith("completions") else {"input": "a"}
    status, error = refusal(path, **text, **body)

    assert (status, error["message"]) == (400, message)


def test_one_adapter_may_be_named_twice(post, calls):
    post("/v1/embeddings?model=embedder:legal", model="embedder:legal", adapter="legal", input="a")

    assert adapter_of(calls) == "legal"


def test_without_a_model_it_is_the_adapter_of_the_default_one(make_app, send, calls):
    for app, body in (
        (make_app(model="embedder"), {"adapter": "legal"}),
        (make_app(model="embedder:legal"), {}),
    ):
        response = send("POST", "/v1/embeddings", {"input": "a", **body}, app=app)
        assert response.json()["model"] == "embedder:legal"
        assert send("GET", "/health", app=app).status_code == 200


def test_models_are_listed_before_their_adapters(send, calls, adapters):
    calls.states = [ModelState(name, "1", "READY") for name in ("writer", "embedder")]
    adapters["writer"] = InvalidRequest("an older server")

    data = send("GET", "/v1/models").json()["data"]

    assert [(each["id"], each["root"], each["parent"]) for each in data] == [
        ("embedder", "embedder", None),
        ("embedder:legal", "legal", "embedder"),
        ("embedder:mail", "mail", "embedder"),
        ("writer", "writer", None),
    ]
    assert send("GET", "/v1/models/embedder:mail").json() == data[2]
    # by its own name, as of vLLM
    assert send("GET", "/v1/models/mail").json() == data[2]
    assert send("GET", "/v1/models/embedder:cut").status_code == 404


def test_the_server_is_asked_once_for_many_requests(make_app, send, calls, monkeypatch):
    app = make_app()

    def ask(name):
        body = {"input": "a", "model": name}
        return send("POST", "/v1/embeddings", body, app=app).status_code

    assert {ask("embedder:legal") for _ in range(3)} == {200}
    assert (calls.asked_models, calls.asked_adapters) == (1, ["embedder"])
    # loaded again with one more
    calls.adapters["embedder"] = {"new": ""}
    assert ask("embedder:new") == 404
    # a second later
    monkeypatch.setattr(models, "_STATE_SECONDS", 0.0)
    assert ask("embedder:new") == 200
