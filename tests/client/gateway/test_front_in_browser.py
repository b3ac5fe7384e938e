"""The pages `/` and `/docs` in a real browser, and what other pages cannot do."""

import pytest
from starlette.responses import HTMLResponse

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.app import create_app
from varlen_client.wire import ModelState

from .browser import browser, executable
from .fake_models import Calls, FakeClient
from .served import served

pytestmark = pytest.mark.skipif(
    executable() is None, reason="this machine has no Chromium: chromium or google-chrome in PATH"
)

KEY = "ein-schlüssel-✓"
HOSTILE = "<img src=x onerror=document.title='run'>';\n"
# What the form of each model shows, in a part of it.
SHOWN = {
    "embedder": "cosine similarity",
    "sparse": "2 terms",
    "ranker": "The cat sleeps on the mat.",
    "classifier": "best",
    "writer": "0.0 0.1 0.2 ",
    "tokens": "4 dimensions",
    "tagger": '"object": "pooling"',
    HOSTILE: "cosine similarity",
}


def gateway(**settings):
    """Return a gateway over fake models, served until the end of a `with` block."""
    states = [ModelState(name, "1", "READY") for name in (*SHOWN, "filler")]
    calls = Calls(states=[*states, ModelState("unready", "1", "LOADING")])
    app = create_app(
        GatewaySettings(url="grpc://127.0.0.1:1", **settings),
        lambda name: FakeClient(calls, name),
    )
    return served(app, **settings)


@pytest.fixture(scope="module")
def open_page():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def address():
    with gateway() as (host, port):
        yield f"http://{host}:{port}"


@pytest.fixture(scope="module")
def locked_address():
    with gateway(api_keys=(KEY,)) as (host, port):
        yield f"http://{host}:{port}"


def send_all(page):
    """Open all cards, send their forms, and wait for the answers."""
    page.wait("document.querySelector('details form')")
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait("[...document.querySelectorAll('details')].every(each => each.children.length > 1)")
    page.run("document.querySelectorAll('details form').forEach(each => each.requestSubmit())")
    page.wait(
        "[...document.querySelectorAll('output')].every(each => each.innerText.endsWith('ms'))"
    )


def cards(page):
    """Return the text of each card by the name of its model."""
    name_and_text = "each => [each.querySelector('b').textContent, each.innerText]"
    return dict(page.run(f"[...document.querySelectorAll('details')].map({name_and_text})"))


def is_of(page, address):
    """Return whether a page has loaded nothing from elsewhere, and the browser complains of nothing."""
    return page.complaints() == [] and all(
        each.startswith(f"{address}/") for each in page.requests()
    )


def test_each_model_is_tried_by_its_form(open_page, address):
    page = open_page(f"{address}/")

    send_all(page)

    found = cards(page)
    assert found.keys() == {*SHOWN, "filler", "unready"}
    for name, text in SHOWN.items():
        assert text in found[name]
        assert f"curl {address}/" in found[name]
    assert "ask the server itself" in found["filler"]
    assert "loading" in found["unready"]
    assert page.run("document.title") == "varlen gateway"
    assert page.run("document.querySelector('img')") is None
    assert is_of(page, address)


def test_the_command_follows_the_form_and_is_quoted_for_a_shell(open_page, address):
    page = open_page(f"{address}/")
    page.wait("document.querySelector('textarea')")
    page.run("document.querySelector('textarea').focus()")

    page.run("document.querySelector('textarea').select()")
    page.call("Input.insertText", text="it's")

    assert "'\\''" in page.run("document.querySelector('details pre').textContent")


def test_the_page_asks_for_the_key_and_keeps_it_nowhere(open_page, locked_address):
    page = open_page(f"{locked_address}/")
    page.wait("!document.getElementById('key').hidden")
    assert not any(name in page.text() for name in SHOWN)

    page.call("Input.insertText", text="wrong")
    page.press("Enter", 13)
    page.wait("document.body.innerText.includes('does not accept this key')")
    page.call("Input.insertText", text=KEY)
    page.press("Enter", 13)
    send_all(page)

    assert SHOWN["embedder"] in cards(page)["embedder"]
    assert '-H "Authorization: Bearer $VARLEN_API_KEY"' in page.text()
    assert KEY not in page.run("document.documentElement.outerHTML")
    assert page.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    page.run("document.querySelector('nav a[href=metrics]').click()")
    page.wait("document.body.innerText.includes('varlen_gateway_requests_total')")
    assert all(each.startswith(f"{locked_address}/") for each in page.requests())

    page.run("document.getElementById('docs').click()")
    page.wait("document.querySelector('select')?.options.length")
    assert page.run("location.pathname") == "/docs"
    page.run("history.back()")
    page.wait("document.body.innerText.includes('base URL of OpenAI clients')")
    assert page.run("location.pathname + document.getElementById('key').hidden") == "/true"

    page.load(f"{locked_address}/")
    page.wait("!document.getElementById('key').hidden")


@pytest.mark.parametrize(
    "fetched, said, complains",
    [
        ("Promise.reject(new TypeError('Failed to fetch'))", "The gateway does not answer.", False),
        ("new Response('{}')", "TypeError: ", True),
        ("new Response('{}', {status: 503})", "503", False),
    ],
)
def test_only_a_gateway_without_an_answer_is_said_not_to_answer(
    open_page, address, fetched, said, complains
):
    page = open_page(f"{address}/")
    page.wait("document.querySelector('details form')")
    page.run(f"void (window.fetch = async () => {fetched})")

    page.run("document.querySelector('details form').requestSubmit()")
    page.wait("document.querySelector('[role=alert]')")

    shown = page.run("document.querySelector('[role=alert]').innerText")
    assert said in shown
    assert ("does not answer" in shown) == ("does not answer" in said)
    # mistakes of the page itself are in the browser's console too
    assert bool(page.complaints()) == complains


def test_the_reference_has_each_route_and_sends_its_example(open_page, address):
    page = open_page(f"{address}/docs")

    page.wait("document.querySelector('details')")
    page.run("document.querySelector('select').value = 'embedder'")
    page.run("document.querySelector('select').onchange()")
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait("[...document.querySelectorAll('details')].every(each => each.querySelector('form'))")
    assert page.run("document.querySelectorAll('details').length") > 28
    page.run("document.querySelector('details form').requestSubmit()")
    page.wait("document.querySelector('output').innerText.endsWith('ms')")
    for path in ("/", "/health", "/v1/models", "/v1/models/{name}", "/metrics"):
        route = "each.querySelector('b').innerText + each.querySelector('code').innerText"
        card = f"[...document.querySelectorAll('details')].find(each => {route} == 'GET{path}')"
        page.run(f"{card}.querySelector('form').requestSubmit()")
        page.wait(f"{card}.querySelector('output').innerText.endsWith('ms')")

    first = page.run("document.querySelector('details').innerText")
    assert '"embedding": [' in first
    assert f"curl {address}/v1/embeddings" in first
    assert "input string or list of string" in first
    assert is_of(page, address)


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_phone_shows_the_page_without_scrolling_sideways(open_page, address, path):
    page = open_page(address + path, width=390, scheme="dark")
    page.wait("document.querySelector('details')")
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait("document.querySelector('form button')")

    assert page.run("document.documentElement.scrollWidth") == 390
    assert is_of(page, address)


def test_the_keyboard_is_enough(open_page, address):
    page = open_page(f"{address}/")
    page.wait("document.querySelector('details form')")

    for _ in range(30):
        page.press("Tab", 9)
        if page.run("document.activeElement.type") == "submit":
            break
    page.press("Enter", 13)

    page.wait("document.querySelector('output').innerText.endsWith('ms')")


async def elsewhere(scope, receive, send):
    """A page of another origin."""
    await HTMLResponse("<!doctype html><title>elsewhere</title>")(scope, receive, send)


def test_a_page_of_another_origin_reads_and_frames_nothing(open_page, address):
    with served(elsewhere) as (host, port):
        page = open_page(f"http://{host}:{port}/")
        for options in (
            "{}",
            "{headers: {Accept: 'text/html'}}",
            "{headers: {Authorization: 'Bearer a'}}",
            "{method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{}'}",
        ):
            asked = f"fetch('{address}/', {options}).then(() => 'read', () => 'refused')"
            assert page.run(asked) == "refused"

        page.run(
            f"document.body.append(Object.assign(document.createElement('iframe'), {{src: '{address}/'}}))"
        )
        page.wait("document.querySelector('iframe').contentDocument === null")
        complaints = page.complaints()

    assert any("frame" in each for each in complaints)
