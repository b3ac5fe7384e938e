"""Clients of several replicas: where requests go, and which of them move on."""

import asyncio
from contextlib import contextmanager

import numpy as np
import pytest

from varlen_client import (
    AsyncClient,
    Client,
    DeadlineMissed,
    InvalidRequest,
    InvalidUrl,
    ModelNotFound,
    ModelProcessEnded,
    ModelUnloaded,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)

from .conftest import free_port
from .fake_model import FakeModel
from .fake_server import serve_grpc, serve_http

SERVE = {"grpc": serve_grpc, "http": serve_http}
UNLOADED = "Request for unknown model: 'fake' has no available versions"
NOT_HEALTHY = "Stub process 'fake_0' is not healthy."


@pytest.fixture
def other(server):
    """A second server of the same protocol."""
    yield from SERVE[server.url.partition(":")[0]](FakeModel())


@pytest.fixture
def replicas(server, other, fast_retries):
    """A sync client of both servers, which has read the model's info."""
    with Client([server.url, other.url], "fake", retry=fast_retries) as client:
        client.embed(["first"])
        for each in (server, other):
            each.model.requests.clear()
        yield client


@pytest.fixture
def generators(server, other, fast_retries):
    """A sync client of both servers, whose model generates."""
    server.model.task = other.model.task = "generate"
    with Client([server.url, other.url], "fake", retry=fast_retries) as client:
        yield client


@contextmanager
def failing_first(server, other, fault):
    """Let the first request to come fail, whichever replica it meets."""
    faults = [fault]

    def refuse(received):
        return faults.pop() if faults else None

    server.model.refuse = other.model.refuse = refuse
    yield
    assert not faults


def requests(*servers):
    return [len(server.model.requests) for server in servers]


def test_takes_replicas_in_turn_that_are_equally_free(server, other, vectors_of):
    texts = [f"text {n}" for n in range(320)]

    with Client([server.url, other.url], "fake", concurrency=1) as client:
        np.testing.assert_array_equal(client.embed(texts), vectors_of(texts))

    assert requests(server, other) == [20, 20]


def test_prefers_the_replica_with_fewer_requests_in_flight(server, other):
    server.model.delay = lambda received: 300.0 if received.texts == ["slow"] else 0.0
    other.model.delay = server.model.delay

    async def run():
        async with AsyncClient([server.url, other.url], "fake") as client:
            slow = asyncio.ensure_future(client.embed(["slow"]))
            while sum(requests(server, other)) == 0:
                await asyncio.sleep(0.01)
            for n in range(6):
                await client.embed([f"{n}"])
            slow.cancel()

    asyncio.run(run())

    assert sorted(requests(server, other)) == [1, 6]


def test_no_request_fails_when_a_replica_is_gone(server, fast_retries, vectors_of):
    protocol = server.url.partition(":")[0]
    texts = [f"text {n}" for n in range(64)]
    gone = f"{protocol}://127.0.0.1:{free_port()}"

    with Client([gone, server.url], retry=fast_retries) as client:
        np.testing.assert_array_equal(client.embed(texts), vectors_of(texts))

    assert requests(server) == [8]


@pytest.mark.parametrize(
    "kind, message",
    [
        ("unavailable", "queue full"),
        ("hang_up", "gone"),
        ("reset", "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"),
        ("not_found", UNLOADED),
        ("python_backend", NOT_HEALTHY),
    ],
)
def test_moves_on_to_the_other_replica(replicas, server, other, fault, vectors_of, kind, message):
    with failing_first(server, other, fault(kind, message)):
        np.testing.assert_array_equal(replicas.embed(["a"]), vectors_of(["a"]))

    assert requests(server, other) == [1, 1]


@pytest.mark.parametrize(
    "kind, message, error",
    [
        ("not_found", "Request for unknown model: 'fake' is not found", ModelNotFound),
        ("invalid", "no", InvalidRequest),
        ("internal", "broken", ServerError),
        ("unavailable", "deadline missed: too late", DeadlineMissed),
    ],
)
def test_does_not_move_on_after_another_error(replicas, server, other, fault, kind, message, error):
    with failing_first(server, other, fault(kind, message)), pytest.raises(error):
        replicas.embed(["a"])

    assert sum(requests(server, other)) == 1


def test_does_not_move_on_after_a_timeout(replicas, server, other):
    server.model.delay = other.model.delay = lambda received: 300.0

    with pytest.raises(RequestTimeout):
        replicas.embed(["a"], timeout=0.2)

    assert sum(requests(server, other)) == 1


@pytest.mark.parametrize("kind, message", [("unavailable", "full"), ("not_found", UNLOADED)])
def test_a_stream_moves_on_before_its_first_part(generators, server, other, fault, kind, message):
    if kind == "not_found":
        # as the server sends it in a stream
        kind = "python_backend"
    with failing_first(server, other, fault(kind, message)):
        assert len(list(generators.stream("hello", max_tokens=3))) == 3

    assert requests(server, other) == [1, 1]


def test_a_stream_that_has_begun_is_not_repeated(generators, server, other, fault):
    for each in (server, other):
        each.model.fail_after = (1, fault("unavailable", "shutting down"))
    parts = generators.stream("hello", max_tokens=3)

    assert next(parts).text
    with pytest.raises(ServerUnavailable, match="shutting down"):
        next(parts)

    assert sum(requests(server, other)) == 1


def test_a_stream_whose_connection_is_lost_ends_with_a_clear_error(
    generators, server, other, fault
):
    for each in (server, other):
        each.model.fail_after = (1, fault("reset", "Stream removed (RST_STREAM)"))
    parts = generators.stream("hello", max_tokens=3)

    assert next(parts).text
    with pytest.raises(ServerUnavailable, match=r"no connection to .* server 127\.0\.0\.1"):
        next(parts)


def test_is_unavailable_when_no_replica_runs(unused_url, fast_retries):
    protocol = unused_url.partition(":")[0]
    urls = [unused_url, f"{protocol}://127.0.0.1:{free_port()}"]

    with Client(urls, "fake", retry=fast_retries) as client:
        assert not client.ready()
        with pytest.raises(ServerUnavailable, match="no connection"):
            client.embed(["a"])


@pytest.mark.parametrize(
    "faults, error",
    [
        ([("unavailable", "full")] * 2, ServerUnavailable),
        ([("not_found", UNLOADED), ("unavailable", "full")], ServerUnavailable),
        ([("python_backend", NOT_HEALTHY)] * 2, ModelProcessEnded),
        ([("not_found", UNLOADED)] * 2, ModelUnloaded),
    ],
)
def test_fails_when_every_replica_refused(replicas, server, other, fault, faults, error):
    first, second = [[fault(*each)] * 9 for each in faults]
    server.model.faults, other.model.faults = first, second

    with pytest.raises(error, match=r"\(tried [12] of 2 replicas") as raised:
        replicas.embed(["a"])

    assert type(raised.value) is error


def test_is_ready_with_one_replica(unused_url, fast_retries):
    for server in SERVE[unused_url.partition(":")[0]](FakeModel()):
        with Client([unused_url, server.url], retry=fast_retries) as client:
            assert client.ready()
            assert [model.name for model in client.models()] == ["fake"]
            assert client.status().model_ready


@pytest.mark.parametrize("urls", [[], ["grpc://a", "http://b"], ["grpc://a", "b"]])
def test_refuses_urls_that_are_no_replicas(urls):
    with pytest.raises(InvalidUrl):
        Client(urls)
