"""The pages for browsers, `/` and `/docs`, and what other clients get there."""

import asyncio
import base64
import re
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files

import pytest

from varlen_client.gateway import GatewaySettings, models
from varlen_client.gateway.app import create_app
from varlen_client.gateway.routes import EXAMPLES_BY_TASK
from varlen_client.wire import ModelState

from .conftest import http_client
from .fake_models import MODELS, FakeClient

CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
FIREFOX = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
KEY = "a-key-of-this-test"
HTML = {"Accept": CHROME}
PAGE = files("varlen_client.gateway").joinpath("page.html").read_text()
# Each route by a fake model that fits it; others are of an embedder.
FITTING = {
    "/embed_sparse": "sparse",
    "/embed_all": "tokens",
    "/predict": "classifier",
    "/classify": "classifier",
    "/v1/classify": "classifier",
    "/v1/completions": "writer",
    "/v1/chat/completions": "writer",
} | dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/infinity/rerank"), "ranker")


def kind_of(response):
    assert response.status_code == 200
    return response.headers["content-type"].partition(";")[0]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "accept, kind",
    [
        (CHROME, "text/html"),
        (FIREFOX, "text/html"),
        ("text/html", "text/html"),
        ("TEXT/HTML", "text/html"),
        ("text/*", "text/html"),
        ("text/html, application/json;q=0.9", "text/html"),
        ("*/*;q=0.1, text/html;level=1;q=0.2, text/html", "text/html"),
        (None, "application/json"),
        ("", "application/json"),
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("application/json, text/plain, */*", "application/json"),
        ("text/html, application/json", "application/json"),
        ("text/html;q=0.8, application/json;q=0.9", "application/json"),
        ("text/html;q=0, */*", "application/json"),
        ("text/html;q=2", "application/json"),
        ("text/html;q=", "application/json"),
        ("image/png", "application/json"),
        (",;,q=1;;", "application/json"),
    ],
)
def test_a_client_gets_the_page_if_it_accepts_html_before_json(send, method, accept, kind):
    response = send(method, "/", headers={"Accept": accept or ""})

    assert kind_of(response) == kind
    assert response.headers["vary"] == "Accept"


def test_the_headers_of_accept_are_read_together(send):
    both = [("Accept", "application/json;q=0.5"), ("Accept", "text/html;q=0.6")]

    assert kind_of(send("GET", "/", headers=both)) == "text/html"


def test_a_post_is_of_the_model_whatever_it_accepts(send):
    response = send("POST", "/", {"model": "embedder", "inputs": "a"}, headers=HTML)

    assert len(response.json()[0]) == 4


def test_the_models_are_described_ready_or_not(send, calls):
    calls.settings = {"task": "embed", "max_sequence_tokens": "256"}
    calls.states = [
        ModelState("loading", "1", "LOADING"),
        ModelState("embedder", "1", "UNAVAILABLE"),
        ModelState("embedder", "2", "READY"),
        ModelState("absent", "", ""),
    ]

    answer = send("GET", "/").json()

    unknown = {"task": None, "max_input_length": None, "dimensions": None, "labels": None}
    assert answer["models"] == [
        {"name": "absent", "state": "UNAVAILABLE", **unknown},
        {
            "name": "embedder",
            "state": "READY",
            "task": "embed",
            "max_input_length": 256,
            "dimensions": 4,
            "labels": None,
        },
        {"name": "loading", "state": "LOADING", **unknown},
    ]
    assert answer["version"] == version("varlen-client")


def test_a_task_that_no_config_has_is_that_of_the_outputs(send):
    found = {each["name"]: each for each in send("GET", "/").json()["models"]}

    assert found.keys() == set(MODELS)
    tasks = {name: each["task"] for name, each in found.items()}
    assert tasks == {
        "embedder": "embed",
        "sparse": "sparse_embed",
        "ranker": "classify",
        "classifier": "classify",
        "tagger": "token_classify",
        "answerer": "question_answer",
        "filler": "fill_mask",
        "writer": "generate",
        "tokens": "token_embed",
        "states": "hidden",
        "unknown_width": "hidden",
        "several": "embed",
    }
    assert (found["ranker"]["labels"], found["classifier"]["labels"]) == (1, 3)
    assert found["unknown_width"]["dimensions"] is None


def test_a_model_that_is_unloaded_meanwhile_has_no_details(send, monkeypatch):
    async def unloaded(self, names):
        return {}

    monkeypatch.setattr(FakeClient, "model_infos", unloaded)

    assert {each["task"] for each in send("GET", "/").json()["models"]} == {None}


def test_many_callers_of_the_overview_of_many_models_are_one_question(make_app, calls, monkeypatch):
    async def overviews(callers):
        async with http_client(app) as client:
            answers = await asyncio.gather(*(client.get("/") for _ in range(callers)))
        assert {answer.status_code for answer in answers} == {200}
        return answers[0].json()["models"]

    def connect(name):
        connected.append(name)
        return FakeClient(calls, name)

    names = [f"model{n:03}" for n in range(500)]
    calls.states = [ModelState(name, "1", "READY") for name in names]
    calls.delay, connected = 0.05, []
    # a busy machine takes longer than a second
    monkeypatch.setattr(models, "_STATE_SECONDS", 60.0)
    app = create_app(GatewaySettings(url="grpc://127.0.0.1:1"), connect)

    found = asyncio.run(overviews(100))

    assert [(each["name"], each["task"]) for each in found] == [(each, "embed") for each in names]
    # one connection, one list of models and one question for their infos
    assert (connected, calls.asked_models, calls.asked_infos) == ([None], 1, [names])

    # later the list is read again, and the infos of new models only
    monkeypatch.setattr(models, "_STATE_SECONDS", -1.0)
    calls.states = [*calls.states[1:], ModelState("new", "1", "READY")]
    assert [each["name"] for each in asyncio.run(overviews(1))] == [*names[1:], "new"]
    assert (connected, calls.asked_models, calls.asked_infos) == ([None], 2, [names, ["new"]])


def test_callers_that_wait_for_a_server_that_is_down_share_its_error(make_app, calls):
    async def overviews():
        async with http_client(app) as client:
            return await asyncio.gather(*(client.get("/") for _ in range(20)))

    app = make_app()
    calls.is_down = True

    assert {answer.status_code for answer in asyncio.run(overviews())} == {503}
    # and one question whether the server is there at all
    assert calls.asked_models == 2


def test_every_page_that_the_overview_names_is_there(send):
    for path in send("GET", "/").json()["pages"]:
        assert send("GET", path).status_code == 200


def test_without_a_server_the_page_is_there_and_the_overview_is_not(send, calls):
    calls.is_down = True

    assert kind_of(send("GET", "/", headers=HTML)) == "text/html"
    assert send("GET", "/").status_code == 503


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_only_the_page_needs_no_key_and_it_names_no_model(send, make_app, calls, method):
    app = make_app(api_keys=(KEY,), model="embedder")

    page = send(method, "/", app=app, headers=HTML)
    overview = send(method, "/", app=app)

    assert (kind_of(page), overview.status_code) == ("text/html", 401)
    assert not any(name in page.text for name in ("embedder", KEY))
    assert calls.asked_models == 0
    allowed = send(method, "/", app=app, headers={"Authorization": f"Bearer {KEY}"})
    assert allowed.status_code == 200


@pytest.mark.parametrize("method, path", [("POST", "/"), ("GET", "/info"), ("GET", "/v1/models")])
def test_accepting_html_opens_no_other_route(send, make_app, method, path):
    response = send(method, path, app=make_app(api_keys=(KEY,)), headers=HTML)

    assert response.status_code == 401


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_is_the_same_for_all_and_locked_in(send, path):
    response = send(
        "GET", f"{path}?model=<b>&q=%3Cscript%3E", headers={**HTML, "Origin": "http://other"}
    )

    assert response.text == send("GET", path, headers=HTML).text
    policy = dict(
        each.split(" ", 1) for each in response.headers["content-security-policy"].split("; ")
    )
    hashes = {
        name: base64.b64encode(sha256(content.encode()).digest()).decode()
        for name, content in re.findall(
            r"<(style|script)[^>]*>(.*?)</\1>", response.text, re.DOTALL
        )
    }
    assert policy == {
        "default-src": "'none'",
        "script-src": f"'sha256-{hashes['script']}'",
        "style-src": f"'sha256-{hashes['style']}'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert response.headers["x-frame-options"] == "DENY"
    assert response.headers["cross-origin-opener-policy"] == "same-origin"
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in response.headers


def test_the_page_names_no_other_host_and_makes_no_html_of_text():
    # the namespace of its icon is a name
    hosts = set(re.findall(r"\w+://[^\s'\"`)]*|[\"'`]//[^\"'`]*", PAGE))

    assert hosts == {"http://www.w3.org/2000/svg"}
    sinks = 'innerHTML outerHTML insertAdjacentHTML document.write eval( Function( setTimeout("'
    assert [
        each
        for each in (*sinks.split(), "localStorage", "sessionStorage", "cookie")
        if each in PAGE
    ] == []
    assert re.findall(r"\son\w+=\"|\sstyle=|javascript:|@import|\burl\(", PAGE) == []


def test_the_page_reads_nothing_of_its_address_but_host_and_path():
    found = set(re.findall(r"location\.\w+|URLSearchParams|document\.referrer|postMessage", PAGE))

    assert found == {"location.pathname", "location.href"}


def test_a_path_of_several_routes_names_the_methods_of_all(send):
    response = send("PUT", "/", {})

    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD, POST"
    assert send("POST", "/health", {}).headers["allow"] == "GET"


def test_the_example_of_each_route_is_answered(send, make_app):
    app = make_app(strict=True)
    paths = send("GET", "/openapi.json", app=app).json()["paths"]

    bodies = {
        path: routes["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, routes in paths.items()
        if "post" in routes
    }

    assert len(bodies) > 20
    for path, body in bodies.items():
        model = FITTING.get(path, "embedder")
        found = send("POST", f"{path.replace('{name}', model)}?model={model}", body, app=app)
        assert found.status_code == 200, (path, found.text)


@pytest.mark.parametrize("task", EXAMPLES_BY_TASK)
def test_a_model_of_each_task_is_tried_on_a_route_that_answers(send, task):
    example = EXAMPLES_BY_TASK[task]
    models = FITTING | {"/pooling": "tagger", "/": "answerer"}

    body = {"model": models.get(example.path, "embedder"), **example.body}
    found = send("POST", example.path, body)

    assert found.status_code == 200, found.text


def test_the_page_has_a_form_for_the_tasks_that_have_a_route():
    # a chat is sent by the form of the task generate
    forms = re.findall(r"^    (\w+): (?:\{|tokens,)$", PAGE, re.MULTILINE)

    assert {*forms, "chat"} == EXAMPLES_BY_TASK.keys()


def test_the_reference_has_the_docstrings_of_fields(send):
    forms = send("GET", "/openapi.json").json()["components"]["schemas"]

    assert forms["ChatBody"]["properties"]["model"]["description"].startswith(
        "The model, or `MODEL:ADAPTER`"
    )
