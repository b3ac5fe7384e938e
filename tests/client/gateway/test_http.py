"""HTTP of the gateway's connections: framing, pipelines, limits, refusals. All on real sockets."""

import asyncio
import gc
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress

import aiohttp
import httpx2
import openai
import pytest
import requests

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.app import create_app
from varlen_client.gateway.http_server import MAX_FIELDS, MAX_HEAD_BYTES, GatewayServer

from .fake_models import Calls, FakeClient
from .served import SECONDS, RawClient, echo, running, served

GET = b"GET /a HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def address():
    with served(echo) as found:
        yield found


@pytest.fixture
def client(address):
    with RawClient(address) as found:
        yield found


def echoed(answer):
    status, _, body = answer
    assert status == 200, body
    return json.loads(body)


def error_of(answer):
    status, fields, body = answer
    assert fields["connection"] == "close"
    return status, json.loads(body)["error"]["message"]


def sized(body, *, head=POST):
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na",
        POST + b"Content-Length: 5\r\nContent-Length: 1\r\n\r\na",
        POST + b"Content-Length: 1, 1\r\n\r\na",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: +1\r\n\r\na",
        POST + b"Content-Length: 1e3\r\n\r\na",
        POST + b"Content-Length: 0x1\r\n\r\na",
        POST + b"Content-Length: \xb2\r\n\r\na",
        POST + b"Content-Length: \r\n\r\n",
        POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        POST + b"Content-Length : 1\r\n\r\na",
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        POST + b"X: a\r\n Content-Length: 1\r\n\r\na",
        POST + b"X: a\nContent-Length: 1\r\n\r\na",
        POST + b"X: a\x00b\r\n\r\n",
        b"POST /a HTTP/1.1\nHost: a\n\n",
        b"POST /a HTTP/1.1\r\n\r\n",
        POST + b"Host: b\r\n\r\n",
        CHUNKED + b"1\na\r\n0\r\n\r\n",
        CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
        CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
        CHUNKED + b"-1\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1 \r\na\r\n0\r\n\r\n",
        CHUNKED + b"f" * 18 + b"\r\na\r\n0\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n",
        b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=lambda each: repr(each.removeprefix(POST)[:60]),
)
def test_what_may_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_served(client, sent):
    answer = client.send(sent + SMUGGLED).answer()

    assert error_of(answer)[0] == 400
    assert client.rest() == b""


@pytest.mark.parametrize(
    "sent, status, message",
    [
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na", 400, "Content-Length"),
        (b"GET /a HTTP/2.0\r\nHost: a\r\n\r\n", 505, "the request has HTTP/2.0; send HTTP/1.1"),
        (b"GET /a\r\n\r\n", 505, "the request has HTTP/0.9; send HTTP/1.1"),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "another Transfer-Encoding"),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501, "another Transfer-Encoding"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405, "CONNECT: method not allowed"),
    ],
    ids="lengths version bare gzip-chunked gzip connect".split(),
)
def test_a_refusal_of_a_head_says_what_came(client, sent, status, message):
    found, error = error_of(client.send(sent).answer())

    assert found == status
    assert message in error


@pytest.mark.parametrize(
    "sent, body",
    [
        (sized(b"abc"), "abc"),
        (sized(b""), ""),
        (GET + b"\r\n", ""),
        (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", "abc"),
        (CHUNKED + b"1\r\na\r\n0002\r\nbc\r\n0\r\n\r\n", "abc"),
        (CHUNKED + b'3;a=b;c="d"\r\nabc\r\n0;e\r\n\r\n', "abc"),
        (CHUNKED + b"3\r\nabc\r\n0\r\nAuthorization: k\r\nX: y\r\n\r\n", "abc"),
        (b"\r\n\r\n" + sized(b"abc"), "abc"),
        (b"POST http://a/a HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na", "a"),
        (sized(b"abc", head=POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"), "abc"),
        (sized(b"abc", head=POST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"), "abc"),
        (GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n", ""),
        (
            CHUNKED.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost")
            + b"3\r\nabc\r\n0\r\n\r\n",
            "abc",
        ),
    ],
    ids="length empty get chunked chunks extensions trailers blank absolute h2c websocket"
    " h2c-get h2c-chunked".split(),
)
@pytest.mark.parametrize("step", [None, 1], ids=["whole", "bytes"])
def test_forms_of_a_request_are_read_and_the_next_one_too(client, sent, body, step):
    for begin in range(0, len(sent), step or len(sent)):
        client.send(sent[begin : begin + (step or len(sent))])
    request = echoed(client.answer())

    assert (request["path"], request["body"]) == ("/a", body)
    names = {name for name, _ in request["headers"]}
    assert not names & {"authorization", "upgrade", "x"}
    assert echoed(client.send(sized(b"next")).answer())["body"] == "next"


def test_pipelined_requests_get_their_answers_in_order(client):
    bodies = [b"%d" % number for number in range(300)]

    client.send(b"".join(sized(body) for body in bodies))

    assert [echoed(client.answer())["body"].encode() for _ in bodies] == bodies


def test_requests_before_a_wrong_one_get_their_answers(client):
    client.send(sized(b"first") + b"no HTTP\r\n\r\n" + SMUGGLED)

    assert echoed(client.answer())["body"] == "first"
    assert client.rest() == b""


def test_a_request_may_end_its_connection(client):
    client.send(GET + b"Connection: close\r\n\r\n" + SMUGGLED)

    status, fields, _ = client.answer()
    assert (status, fields["connection"]) == (200, "close")
    assert client.rest() == b""


def test_a_body_that_is_not_read_ends_its_connection(client):
    client.send(sized(b"a" * 100_000).replace(b"/a", b"/unread") + SMUGGLED)

    assert client.answer()[0] == 200
    assert client.rest() == b""


def test_a_client_that_waits_is_told_to_send_its_body(client):
    client.send(POST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert client.answer()[0] == 100

    assert echoed(client.send(b"abc").answer())["body"] == "abc"


@pytest.mark.parametrize("path", [b"/a", b"/stream"])
def test_an_answer_of_http_1_0_has_no_chunks_and_ends_its_connection(client, path):
    client.send(
        b"POST " + path + b" HTTP/1.0\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc"
    )

    head, _, body = client.rest().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert json.loads(body)["body"] == "abc"


def test_a_stream_of_http_1_1_has_chunks(client):
    client.send(GET.replace(b"/a", b"/stream") + b"Connection: close\r\n\r\n")

    head, _, body = client.rest().partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"\r\n0\r\n\r\n")


def test_the_answer_to_head_has_no_body(client):
    client.send(b"HEAD /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    assert client.rest().endswith(b"\r\n\r\n")


@pytest.mark.parametrize("excess, status", [(0, 200), (1, 431)], ids=["most", "more"])
def test_a_head_has_a_most_of_fields(client, excess, status):
    # besides Host
    fields = b"".join(b"x-%d: 1\r\n" % number for number in range(MAX_FIELDS - 1 + excess))

    assert client.send(GET + fields + b"\r\n").answer()[0] == status


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x: " + b"a" * 2 * MAX_HEAD_BYTES + b"\r\n\r\n",
        GET + b"a" * 2 * MAX_HEAD_BYTES + b": a\r\n\r\n",
        GET.replace(b"/a", b"/" + b"a" * 2 * MAX_HEAD_BYTES) + b"\r\n",
        GET + b"".join(b"x-%d: 1\r\n" % number for number in range(10_000)) + b"\r\n",
        CHUNKED + b"0\r\n" + b"".join(b"x-%d: 1\r\n" % number for number in range(200)) + b"\r\n",
    ],
    ids="value name target fields trailers".split(),
)
def test_a_large_head_is_refused(client, head):
    status, message = error_of(client.send(head).answer())

    assert status == 431
    assert "send fewer" in message


def test_a_body_may_have_many_small_chunks(client):
    client.send(CHUNKED + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n")

    assert echoed(client.answer())["body"] == "a" * 20_000


def test_a_large_body_may_have_many_chunks_of_some_size(client):
    chunk = b"80\r\n" + b"a" * 128 + b"\r\n"
    client.send(CHUNKED + chunk * 30_000 + b"0\r\n\r\n")

    assert len(echoed(client.answer())["body"]) == 128 * 30_000


@pytest.mark.parametrize(
    "chunk, count",
    [(b"1\r\na\r\n", 1_200_000), (b"1;" + b"a" * 4000 + b"\r\na\r\n", 1000)],
    ids=["bytes", "extensions"],
)
def test_a_body_of_mostly_framing_is_refused(client, chunk, count):
    status, message = error_of(client.send(CHUNKED + chunk * count + b"0\r\n\r\n").answer())

    assert (status, message) == (400, "the body has too many small chunks; send larger ones")
    assert client.rest() == b""


LARGE = 20 << 20


@pytest.fixture(scope="module")
def gateway():
    settings = {"api_keys": ("k",), "max_body_bytes": 1 << 20}
    calls = Calls()
    app = create_app(
        GatewaySettings(url="grpc://127.0.0.1:1", **settings), lambda name: FakeClient(calls, name)
    )
    with served(app, **settings) as (host, port):
        yield f"http://{host}:{port}"


def of_requests(url, headers, body):
    return requests.post(url, data=body, headers=headers, timeout=20).status_code


def of_httpx(url, headers, body):
    return httpx2.post(url, content=body, headers=headers, timeout=20).status_code


def of_urllib(url, headers, body):
    request = urllib.request.Request(url, body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    with refused.value:
        return refused.value.code


def of_aiohttp(url, headers, body):
    async def post():
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=io.BytesIO(body), headers=headers) as response,
        ):
            status = response.status
        # the rest of the body is still to be sent, by a transport that aiohttp leaves to the loop
        for transport in list(asyncio.get_running_loop()._transports.values()):
            transport.abort()
        await asyncio.sleep(0)
        return status

    return asyncio.run(post())


def of_curl(url, headers, body):
    given = [option for field in headers.items() for option in ("-H", "{}: {}".format(*field))]
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *given]
    command += ["--data-binary", "@-", url]
    return int(subprocess.run(command, input=body, capture_output=True, check=True).stdout)


def of_openai(url, headers, body):
    key = headers["Authorization"].removeprefix("Bearer ")
    base = url.removesuffix("/embeddings")
    with openai.OpenAI(base_url=base, api_key=key, max_retries=0) as asking:
        with pytest.raises(openai.APIStatusError) as refused:
            asking.embeddings.create(model="embedder", input=body.decode())
    return refused.value.status_code


CLIENTS = [of_requests, of_httpx, of_urllib, of_aiohttp, of_curl, of_openai]


@pytest.mark.parametrize("key, status", [("wrong", 401), ("k", 413)])
@pytest.mark.parametrize("post", CLIENTS, ids=lambda each: each.__name__)
def test_clients_that_send_a_large_body_first_see_why_it_is_refused(gateway, post, key, status):
    if post is of_curl and shutil.which("curl") is None:
        pytest.skip("this machine has no curl")
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    assert post(f"{gateway}/v1/embeddings", headers, b"a" * LARGE) == status


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"], ids=["body", "expect"])
def test_a_refused_request_has_its_answer_and_its_end_before_its_body(gateway, expect):
    host, _, port = gateway.removeprefix("http://").partition(":")
    head = b"POST /embed HTTP/1.1\r\nHost: a\r\n" + expect + b"Content-Length: 1000\r\n\r\n"
    with RawClient((host, int(port))) as client:
        status, fields, _ = client.send(head).answer()
        assert (status, fields["connection"]) == (401, "close")
        assert client.rest() == b""


def test_a_signal_during_the_first_collection_ends_the_server(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    settings = GatewaySettings(url="grpc://127.0.0.1:1")
    server = GatewayServer(echo, settings, log_level="critical", lifespan="off")
    late = threading.Timer(SECONDS, lambda: setattr(server, "should_exit", True))
    late.start()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server.run_alone([listener])
        assert late.is_alive()
    finally:
        signal.signal(signal.SIGTERM, before)
        late.cancel()


def test_a_client_that_reads_no_answer_does_not_outlive_the_server():
    async def large(scope, receive, send):
        body = bytes(32 << 20)
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    settings = GatewaySettings(url="grpc://127.0.0.1:1")
    server = GatewayServer(large, settings, log_level="critical", lifespan="off")
    server.config.timeout_graceful_shutdown = 0.2
    begin = time.monotonic()
    with running(server) as address:
        client = RawClient(address).send(GET + b"\r\n")
        while not server.server_state.total_requests:
            assert time.monotonic() < begin + SECONDS
            time.sleep(0.01)

    assert not server.server_state.connections
    assert time.monotonic() < begin + SECONDS
    with client, suppress(ConnectionResetError):
        assert len(client.rest()) < 32 << 20


def test_health_is_answered_while_slow_bodies_hold_all_connections():
    with served(echo, max_connections_per_address=4) as address, ExitStack() as stack:
        slow = [stack.enter_context(RawClient(address)) for _ in range(4)]
        for each in slow:
            each.send(POST + b"Content-Length: 2\r\n\r\na")
            # one after the other
            time.sleep(0.01)

        with RawClient(address) as probe:
            begin = time.monotonic()
            health = probe.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n").answer()
            seconds = time.monotonic() - begin

        assert echoed(health)["path"] == "/health"
        assert seconds < SECONDS / 2
        # the slowest body has been closed for it, and the others are read to their end
        ended = [each.ends() for each in slow]
        assert sum(ended) == 1
        for each, is_over in zip(slow, ended, strict=True):
            if not is_over:
                assert echoed(each.send(b"b").answer())["body"] == "ab"
