"""Fixtures: fake servers of each protocol, and clients of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from varlen_client import Client, RetryPolicy

from .fake_model import FakeModel, Fault, vector_of_ids, vector_of_text
from .fake_server import FakeServer, serve_grpc, serve_http

FAST_RETRIES = RetryPolicy(max_retries=3, first_delay=0.01, max_delay=0.02)


@pytest.fixture(params=["grpc", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """A fake server of each protocol; its behaviour is set on `server.model`."""
    yield from (serve_grpc if request.param == "grpc" else serve_http)(FakeModel())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(params=["grpc", "http"])
def unused_url(request: pytest.FixtureRequest) -> str:
    """URL of a port on which no server listens."""
    return f"{request.param}://127.0.0.1:{free_port()}"


@pytest.fixture(params=["grpc", "http"])
def server_that_hangs_up(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[int]]]:
    """URL of a server that accepts and closes every connection, and the list of connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[int] = []

    def hang_up() -> None:
        while True:
            try:
                connection, (_, port) = listener.accept()
            except OSError:
                return
            with connection:
                connections.append(port)
                connection.recv(64)

    thread = threading.Thread(target=hang_up)
    thread.start()
    yield f"{request.param}://127.0.0.1:{listener.getsockname()[1]}", connections
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def fast_retries() -> RetryPolicy:
    """A policy of three retries, milliseconds apart."""
    return FAST_RETRIES


@pytest.fixture
def client(server: FakeServer, fast_retries: RetryPolicy) -> Iterator[Client]:
    """A sync client of the fake server."""
    with Client(server.url, retry=fast_retries) as client:
        yield client


@pytest.fixture
def fault() -> type[Fault]:
    """The type of the failures that a fake model injects."""
    return Fault


@pytest.fixture
def vectors_of() -> Callable[[list[Any]], np.ndarray]:
    """Return a function that computes the fake model's output for texts or token ids."""

    def expected(rows: list[Any]) -> np.ndarray:
        return np.stack(
            [
                vector_of_text(row) if isinstance(row, str) else vector_of_ids(np.array(row))
                for row in rows
            ]
        )

    return expected
