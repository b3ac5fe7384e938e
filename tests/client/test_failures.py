"""The sync client when requests fail: retries, deadlines, timeouts and lost connections."""

import socket
import time

import numpy as np
import pytest

from varlen_client import (
    Client,
    DeadlineMissed,
    InvalidRequest,
    ModelNotFound,
    RequestTimeout,
    RetryPolicy,
    ServerError,
    ServerUnavailable,
)
from varlen_client.tasks.labels import RERANK

TEXTS = [f"text {'x' * (n % 7)} {n}" for n in range(50)]


@pytest.mark.parametrize("kind", ["unavailable", "hang_up"])
def test_retries_while_the_server_is_unavailable(client, server, fault, vectors_of, kind):
    server.model.faults = [fault(kind, "queue full")] * 3

    np.testing.assert_array_equal(client.embed(["a"]), vectors_of(["a"]))

    assert len(server.model.requests) == 4


def test_fails_after_the_last_retry_with_the_number_of_attempts(client, server, fault):
    server.model.faults = [fault("unavailable", "queue full")] * 4

    with pytest.raises(ServerUnavailable, match=r"queue full \(tried 4 times in"):
        client.embed(["a"])


def test_a_missed_deadline_is_not_retried(client, server, fault):
    message = "deadline missed: the answer is expected in 9 ms, the deadline is in 5 ms"
    server.model.faults = [fault("unavailable", message)]

    with pytest.raises(DeadlineMissed, match=f"^{message}$"):
        client.embed(["a"], deadline_ms=60_000)

    assert len(server.model.requests) == 1


def test_a_retry_is_sent_with_the_remaining_deadline(server, fault):
    server.model.faults = [fault("unavailable", "queue full")] * 2
    policy = RetryPolicy(max_retries=2, first_delay=0.2, max_delay=0.2)

    with Client(server.url, retry=policy) as client:
        client.embed(["a"], deadline_ms=60_000)

    first, second, third = (
        received.parameters["deadline_ms"] for received in server.model.requests
    )
    assert first == 60_000
    # each delay is at least 100 ms
    assert third + 100 <= second <= 59_900
    assert third > 0


@pytest.mark.parametrize("limit", [{"deadline_ms": 30_000}, {"timeout": 30.0}], ids=str)
def test_no_retry_starts_after_the_end_of_the_call(server, fault, limit):
    server.model.faults = [fault("unavailable", "queue full")] * 9
    policy = RetryPolicy(max_retries=9, first_delay=90.0, max_delay=90.0)
    start = time.monotonic()

    with Client(server.url, retry=policy) as client, pytest.raises(ServerUnavailable):
        client.embed(["a"], **limit)

    assert time.monotonic() - start < 30
    assert len(server.model.requests) == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [("invalid", InvalidRequest), ("not_found", ModelNotFound), ("internal", ServerError)],
)
def test_other_failures_are_not_retried(client, server, fault, kind, error):
    server.model.faults = [fault(kind, "[request id: <id_unknown>] message of the server")]

    with pytest.raises(error, match=r"^message of the server$"):
        client.embed(["a"])

    assert len(server.model.requests) == 1


def test_an_error_reports_rows_of_the_whole_input(client, server, fault):
    def refuse(received):
        return fault("invalid", "row 3: too long") if TEXTS[19] in received.texts else None

    server.model.refuse = refuse

    with pytest.raises(InvalidRequest, match=r"^rows 16-23 of 50: row 19: too long$") as caught:
        client.embed(TEXTS)

    assert caught.value.rows == range(16, 24)


def test_the_first_failure_cancels_the_other_requests(server, fault):
    server.model.refuse = lambda received: fault("invalid") if received.texts == ["bad"] else None
    server.model.delay = lambda received: 0.0 if received.texts == ["bad"] else 60.0
    start = time.monotonic()

    with (
        Client(server.url, rows_per_request=1, concurrency=2) as client,
        pytest.raises(InvalidRequest, match="row 1 of 6"),
    ):
        client.embed(["a", "bad", "c", "d", "e", "f"])

    assert time.monotonic() - start < 30
    assert len(server.model.requests) <= 3


def test_a_timeout_ends_the_whole_call_without_a_retry(client, server):
    server.model.delay = lambda received: 0.0 if TEXTS[0] in received.texts else 300.0

    # a busy machine may need a longer timeout for its first answer
    for timeout in (0.5, 5, 50):
        server.model.requests.clear()
        start = time.monotonic()
        with pytest.raises(RequestTimeout) as caught:
            client.embed(TEXTS, timeout=timeout)
        assert time.monotonic() - start < timeout + 30
        assert len(server.model.requests) <= 5
        if "0 of 50" not in str(caught.value):
            break

    assert f"embed did not end within {timeout} s; 8 of 50 rows" in str(caught.value)


def test_a_timeout_includes_the_question_for_the_model(server):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{server.url.split('://')[0]}://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()

        with Client(url, "fake") as client, pytest.raises(RequestTimeout):
            client.counted(RERANK, [("q", "d")], timeout=0.3)

    assert time.monotonic() - start < 30


def test_a_client_can_be_used_after_a_timeout(client, server, vectors_of):
    server.model.delay = lambda received: 30.0
    with pytest.raises(RequestTimeout):
        client.embed(["a"], timeout=0.2)
    server.model.delay = lambda received: 0.0

    np.testing.assert_array_equal(client.embed(["b"], timeout=10), vectors_of(["b"]))


def test_no_connection_is_server_unavailable(unused_url, fast_retries):
    with Client(unused_url, "fake", retry=fast_retries) as client:
        with pytest.raises(ServerUnavailable, match=r"no connection to .* server 127\.0\.0\.1"):
            client.embed(["a"])
        assert client.ready() is False


def test_each_retry_connects_again(server_that_hangs_up):
    # by default gRPC waits more than a second before the next connection
    url, connections = server_that_hangs_up
    policy = RetryPolicy(max_retries=2, first_delay=0.3, max_delay=0.3)
    with Client(url, "fake", retry=policy) as client, pytest.raises(ServerUnavailable):
        client.embed(["a"])

    assert len(connections) >= 3


def test_an_error_about_the_port_of_the_other_protocol_is_short(server):
    other = {"grpc": "http", "http": "grpc"}
    scheme, address = server.url.split("://")

    with Client(
        f"{other[scheme]}://{address}", model="fake", retry=RetryPolicy(max_retries=0)
    ) as client:
        with pytest.raises((ServerError, ServerUnavailable)) as caught:
            client.embed(["a"])

    assert address in str(caught.value)
    assert "headers" not in str(caught.value)
