"""What every request to the gateway passes: key, limits, disconnects, errors, metrics."""

import asyncio
import gc
import json

import pytest

from varlen_client.errors import (
    DeadlineMissed,
    InvalidRequest,
    ModelNotFound,
    ModelProcessEnded,
    ModelUnloaded,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)
from varlen_client.gateway import GatewaySettings, edge, models
from varlen_client.gateway.app import create_app
from varlen_client.gateway.connections import LEFT
from varlen_client.gateway.generation import MAX_MESSAGES
from varlen_client.gateway.models import TENANT
from varlen_client.wire import ModelState

from .asgi import Exchange
from .conftest import http_client
from .fake_models import MODELS, FakeClient

EMBED = {"model": "embedder", "inputs": "a"}
KEYS = ("first-key", "schlüssel")
# Longer than anything here takes.
SECONDS = 20.0


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic first-key"}, 401),
        ({"Authorization": "Bearer first-key"}, 200),
        ({"Authorization": "bearer first-key"}, 200),
    ],
    ids=["none", "wrong", "scheme", "right", "lower case"],
)
@pytest.mark.parametrize("path", ["/embed", "/v1/models", "/metrics"])
def test_a_request_needs_one_of_the_keys(send, make_app, calls, path, headers, status):
    method, body = ("POST", EMBED) if path == "/embed" else ("GET", None)

    response = send(method, path, body, app=make_app(api_keys=KEYS), headers=headers)

    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert calls.received == []


@pytest.mark.parametrize("path", ["/health", "/docs", "/openapi.json"])
def test_probes_and_the_api_page_need_no_key(send, make_app, path):
    assert send("GET", path, app=make_app(api_keys=KEYS)).status_code == 200


def test_a_body_may_be_as_large_as_the_limit(send, make_app):
    size = len(json.dumps(EMBED, separators=(",", ":")))

    for limit, status in ((size, 200), (size - 1, 413)):
        response = send("POST", "/embed", EMBED, app=make_app(max_body_bytes=limit))
        assert response.status_code == status
    assert response.json()["error"]["message"] == (
        f"the body is larger than {size - 1} bytes (--max-body-bytes)"
    )


def test_a_body_that_does_not_come_gives_its_place_back(make_app, monkeypatch):
    monkeypatch.setattr(edge, "_BODY_STEP_SECONDS", 0.05)
    app = make_app(max_requests=1)

    async def silent():
        yield b"{"
        await asyncio.sleep(SECONDS)

    async def run():
        async with http_client(app, timeout=SECONDS) as client:
            return await client.post("/embed", content=silent()), await client.post(
                "/embed", json=EMBED
            )

    slow, after = asyncio.run(run())

    assert slow.status_code == 408
    assert slow.json()["error"]["code"] == "body_too_slow"
    assert after.status_code == 200


def test_no_more_requests_run_than_the_limit(make_app, calls):
    calls.delay = 30.0
    app = make_app(max_requests=3)

    async def run():
        async with http_client(app, timeout=SECONDS) as client:
            held = [asyncio.create_task(client.post("/embed", json=EMBED)) for _ in range(3)]
            while calls.running < 3:
                await asyncio.sleep(0.01)
            refused = [await client.post(path, json=EMBED) for path in ("/v1/embeddings", "/embed")]
            health = await client.get("/health")
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            calls.delay = 0.0
            return refused, health, await client.post("/embed", json=EMBED)

    refused, health, after = asyncio.run(run())

    assert [(each.status_code, each.headers["retry-after"]) for each in refused] == [
        (503, "1"),
        (429, "1"),
    ]
    message = "the gateway has 3 requests, and takes no more now"
    openai, tei = (each.json() for each in refused)
    assert openai["error"]["message"] == message
    assert tei == {"error": message, "error_type": "Overloaded"}
    assert (health.status_code, after.status_code) == (200, 200)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/embed", EMBED),
        ("/embed", {"model": "embedder", "inputs": 1}),
        ("/v1/completions", {"model": "writer", "prompt": "a"}),
        ("/v1/completions", {"model": "writer", "prompt": "a", "stream": True}),
    ],
    ids=["embed", "refused", "completion", "stream"],
)
def test_no_part_of_a_request_waits_for_a_collection(make_app, path, body):
    app = make_app()

    async def in_cycles():
        await Exchange(path, body).run(app)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await Exchange(path, body).run(app)
            gc.collect()
            return [each.__qualname__ for each in gc.garbage if _is_of_gateway(each)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    assert asyncio.run(in_cycles()) == []


def _is_of_gateway(each):
    return getattr(each, "__module__", None) == edge.__name__ and hasattr(each, "__qualname__")


@pytest.mark.parametrize(
    "path, body",
    [
        ("/embed", EMBED),
        ("/v1/completions", {"model": "writer", "prompt": "a"}),
        ("/v1/completions", {"model": "writer", "prompt": ["a", "b"]}),
        ("/v1/completions", {"model": "writer", "prompt": "a", "stream": True, "max_tokens": 99}),
    ],
    ids=["embed", "completion", "prompts", "stream"],
)
def test_a_client_that_leaves_cancels_its_request(make_app, calls, path, body):
    streams = body.get("stream", False)
    calls.delay = 0.01 if streams else 30.0
    app, sent = make_app(), []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    async def run():
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
        }
        task = asyncio.create_task(app(scope, receive, send))
        while not (len(sent) > 2 if streams else calls.running):
            await asyncio.sleep(0.01)
        scope[LEFT]()
        await asyncio.wait_for(task, SECONDS)
        async with http_client(app) as client:
            return (await client.get("/metrics")).text

    page = asyncio.run(run())

    prompts = body.get("prompt")
    assert calls.cancelled == (len(prompts) if isinstance(prompts, list) else 1)
    assert calls.running == 0
    assert f'varlen_gateway_requests_total{{path="{path}",status="499"}} 1.0' in page
    assert (len(sent) > 0) == streams


@pytest.mark.parametrize(
    "failure, status, message",
    [
        (InvalidRequest("row 3: text is empty"), 400, "row 3: text is empty"),
        (ModelNotFound("no model 'a'"), 404, "no model 'a'"),
        (ModelUnloaded("'/opt' has no available versions"), 503, "unloaded the model"),
        (ServerUnavailable("queue of 10.0.0.1 is full"), 503, "the server cannot accept"),
        (
            ModelProcessEnded("the process of a_0 has ended: /opt"),
            503,
            "the model's process has ended",
        ),
        (RequestCancelled("dropped"), 503, "the server cannot accept"),
        (DeadlineMissed("late by 3"), 504, "not complete in time"),
        (RequestTimeout("10.0.0.1 is slow"), 504, "not complete in time"),
        (ServerError("File /opt/a.py"), 502, "the server failed"),
        (RuntimeError("File /opt/a.py"), 500, "the gateway failed"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else None,
)
def test_an_error_has_its_status_and_no_secrets(refusal, calls, failure, status, message):
    calls.failure = failure

    found, error = refusal("/v1/embeddings", model="embedder", input="a")

    assert found == status
    assert message in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    for secret in ("10.0.0.1", "/opt", "Traceback"):
        assert secret not in error["message"]


@pytest.mark.parametrize(
    "method, path, content, status, message",
    [
        ("POST", "/embed", b"{", 400, "the body is not JSON"),
        ("POST", "/embed", b"[]", 400, "the body is []; send a JSON object"),
        ("POST", "/embed", b"", 400, "the body is empty; send a JSON object"),
        (
            "POST",
            "/embed",
            b'{"inputs": "\xff"}',
            400,
            "the body cannot be read; send JSON in UTF-8",
        ),
        ("POST", "/nothing", b"{}", 404, "POST /nothing: not found"),
        ("GET", "/embed", b"", 405, "GET /embed: method not allowed"),
    ],
    ids=["half", "list", "empty", "latin", "path", "method"],
)
def test_what_is_no_request_gets_the_same_form_of_error(
    send, method, path, content, status, message
):
    headers = {"Content-Type": "application/json"}
    response = send(method, path, content=content, headers=headers)

    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_a_body_of_another_type_is_refused_with_the_header_that_it_needs(send):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = send("POST", "/embed", content=b'{"inputs": "a"}', headers=headers)

    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "the body is not read; send the header Content-Type: application/json"


def test_health_needs_a_ready_model(send, make_app, calls):
    assert send("GET", "/health").json() == {"status": "ok"}
    assert send("GET", "/health", app=make_app(model="missing")).status_code == 503
    calls.states = [ModelState("embedder", "1", "UNAVAILABLE")]
    assert send("GET", "/health").status_code == 503
    calls.is_down = True
    assert send("GET", "/health").status_code == 503


def test_many_questions_for_health_ask_the_server_once_in_a_while(make_app, calls, monkeypatch):
    async def ask(times):
        async with http_client(app) as client:
            answers = await asyncio.gather(*(client.get("/health") for _ in range(times)))
        return {answer.status_code for answer in answers}

    app = make_app()
    assert asyncio.run(ask(50)) == {200}
    assert calls.asked_models == 1
    calls.is_down = True
    assert asyncio.run(ask(1)) == {200}

    monkeypatch.setattr(models, "_STATE_SECONDS", -1.0)
    assert asyncio.run(ask(3)) == {503}
    assert calls.asked_models == 4


def test_lists_the_ready_models(send, calls):
    calls.states = [ModelState("a", "1", "READY"), ModelState("b", "1", "LOADING")]

    assert [model["id"] for model in send("GET", "/v1/models").json()["data"]] == ["a"]
    assert send("GET", "/v1/models/a").json()["object"] == "model"
    assert send("GET", "/v1/models/b").status_code == 404


def test_a_request_without_a_model_gets_the_gateways_or_the_only_one(send, make_app, calls):
    body = {"inputs": "a"}
    several = send("POST", "/embed", body)
    assert several.status_code == 404
    assert (
        f"the server has {len(MODELS)} ready models, choose one"
        in several.json()["error"]["message"]
    )

    assert send("POST", "/embed", body, app=make_app(model="embedder")).status_code == 200
    calls.states = [ModelState("embedder", "1", "READY")]
    assert send("POST", "/embed", body).status_code == 200
    calls.states = []
    assert send("POST", "/embed", body).status_code == 503


@pytest.mark.parametrize(
    "path, body",
    [
        ("/embed", {"inputs": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_the_query_may_name_the_model(send, calls, path, body):
    model = "embedder" if "embed" in path else "writer"

    assert send("POST", f"{path}?model={model}", body).status_code == 200
    assert send("POST", f"{path}?model={model}", body | {"model": model}).status_code == 200
    assert [each[0] for each in calls.received] == [model, model]
    # the name in one request is not the next one's
    assert send("POST", path, body).status_code == 404


def test_two_names_of_models_are_refused(send, calls):
    response = send("POST", "/embed?model=ranker", {"inputs": "a", "model": "embedder"})

    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "the request has the model 'embedder', and 'ranker' in its query; send one of them"
    )
    assert calls.received == []


def test_unknown_models_are_refused_without_a_client(refusal, calls):
    status, error = refusal("/v1/embeddings", model="gpt-5", input="a")

    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"] == "the server has no model 'gpt-5'"
    assert calls.received == []


def test_metrics_count_requests_by_path_and_status_and_tokens(make_app):
    app = make_app()

    async def run():
        async with http_client(app) as client:
            await client.post("/embed", json={"model": "embedder", "inputs": ["ab", "c"]})
            await client.post("/embed_sparse", json={"model": "embedder", "inputs": ["abc"]})
            await client.post("/embed", json={})
            await client.get("/etc/passwd")
            for name in ("embedder", "missing"):
                await client.post(f"/v2/models/{name}/infer", json={})
                await client.get(f"/v1/models/{name}")
            await client.post("/v1/completions", json={"model": "writer", "prompt": "a"})
            ranked = {"model": "ranker", "query": "q", "texts": ["ab", "c"]}
            await client.post("/rerank", json=ranked)
            await client.post("/predict", json={"model": "classifier", "inputs": "abcd"})
            return (await client.get("/metrics")).text.splitlines()

    page = asyncio.run(run())

    assert 'varlen_gateway_requests_total{path="/embed",status="200"} 1.0' in page
    assert 'varlen_gateway_requests_total{path="/embed",status="400"} 1.0' in page
    # names of paths are bounded, and models are no names of paths
    infer, model = "/v2/models/{name}/infer", "/v1/models/{name}"
    assert f'varlen_gateway_requests_total{{path="{infer}",status="400"}} 2.0' in page
    for status in (200, 404):
        assert f'varlen_gateway_requests_total{{path="{model}",status="{status}"}} 1.0' in page
    assert 'varlen_gateway_requests_total{path="other",status="404"} 1.0' in page
    assert 'varlen_gateway_tokens_total{kind="prompt"} 20.0' in page
    assert 'varlen_gateway_tokens_total{kind="completion"} 4.0' in page
    # this request
    assert "varlen_gateway_requests_in_flight 1.0" in page


def test_pages_of_the_named_origins_may_send_requests(send, make_app):
    app = make_app(cors_origins=("https://a.example",), api_keys=KEYS)
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}

    assert send("OPTIONS", "/embed", app=app, headers=headers).status_code == 200
    for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
        response = send("POST", "/embed", EMBED, app=app, headers={"Origin": origin})
        assert (response.headers.get("access-control-allow-origin") == origin) == allowed


@pytest.mark.parametrize(
    "path, body",
    [
        ("/embed", EMBED),
        ("/rerank", {"model": "ranker", "query": "a", "texts": ["b"]}),
        ("/predict", {"model": "classifier", "inputs": "a"}),
    ],
)
def test_overload_has_teis_form_and_status_on_its_paths(send, calls, path, body):
    calls.failure = ServerUnavailable("queue of 10.0.0.1 is full")

    response = send("POST", path, body)

    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    message = "the server cannot accept the request now; send it later"
    assert response.json() == {"error": message, "error_type": "Overloaded"}


def test_a_server_that_is_down_is_not_overloaded(refusal, calls):
    calls.failure, calls.is_down = ServerUnavailable("no connection"), True

    status, error = refusal("/embed", **EMBED)

    assert (status, error["code"]) == (503, "unavailable")


@pytest.mark.parametrize("name", ["org/name", "org%2Fname", "a/b/c", "absent"])
def test_a_model_that_is_not_there_is_not_found_whatever_its_name(send, name):
    response = send("GET", f"/v1/models/{name}")

    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_the_api_page_describes_every_path(send):
    paths = send("GET", "/openapi.json").json()["paths"]

    assert paths.keys() == {
        "/v1/embeddings", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models",
        "/v1/models/{name}", "/", "/embed", "/embed_sparse", "/rerank", "/v1/rerank", "/v2/rerank",
        "/predict", "/info", "/health", "/metrics", "/embed_all", "/similarity", "/v1/score", "/score",
        "/v1/embed", "/v2/embed", "/infinity/rerank", "/infinity/embeddings", "/v2/models/{name}/infer",
        "/tokenize", "/detokenize", "/decode", "/classify", "/v1/classify", "/pooling", "/v1/extract",
    }  # fmt: skip


def test_the_api_page_describes_the_bodies_that_the_gateway_reads_itself(send):
    page = send("GET", "/openapi.json").json()
    forms = page["components"]["schemas"]

    def form_of(path):
        body = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return forms[body["$ref"].rpartition("/")[2]]["properties"]

    kinds = [each["type"] for each in form_of("/v1/embeddings")["input"]["anyOf"]]
    assert kinds == ["string", "array", "array", "array"]
    assert form_of("/v1/chat/completions")["messages"]["maxItems"] == MAX_MESSAGES
    assert form_of("/v2/rerank")["return_documents"]["default"] is False
    assert "model" in form_of("/")


def test_the_end_of_the_gateway_closes_its_clients(make_app, calls):
    app = make_app()

    async def run():
        async with app.router.lifespan_context(app), http_client(app) as client:
            await client.post("/embed", json=EMBED)

    asyncio.run(run())

    # of the model, and of the server
    assert calls.closed == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_requests": 0}, "max_requests is 0; allowed: above 0"),
        ({"timeout_seconds": -1.0}, "timeout_seconds is -1.0"),
        ({"api_keys": ("a", "")}, "an API key is empty"),
    ],
    ids=["requests", "timeout", "key"],
)
def test_refuses_impossible_settings(options, message):
    with pytest.raises(ValueError, match=message):
        GatewaySettings(url="grpc://127.0.0.1", **options)


def test_callers_of_different_keys_are_different_tenants_and_their_names_tell_no_key(calls):
    connected = []

    def connect(model):
        connected.append((model, TENANT.get()))
        return FakeClient(calls, model)

    app = create_app(GatewaySettings(url="grpc://127.0.0.1:1", api_keys=KEYS), connect)

    async def ask():
        for key in (*KEYS, KEYS[0]):
            headers = {"Authorization": f"Bearer {key}".encode()}
            async with http_client(app, headers=headers) as client:
                assert (await client.post("/embed", json=EMBED)).status_code == 200

    asyncio.run(ask())

    # a client of each caller, beside the one that asks for the server's models
    tenants = [tenant for model, tenant in connected if model is not None]
    assert len(tenants) == len(set(tenants)) == len(KEYS)
    assert not any(key in tenant for key in KEYS for tenant in tenants)
