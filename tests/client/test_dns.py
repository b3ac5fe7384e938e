"""Clients of a name with several addresses, over each protocol, with and without TLS."""

import socket
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from varlen_client import Client, ServerUnavailable

from .fake_model import FakeModel
from .fake_server import CERTIFICATE, serve_grpc, serve_http

SERVE = {"grpc": serve_grpc, "http": serve_http}
ADDRESSES = ["127.0.0.1", "127.0.0.2"]


@pytest.fixture
def name(monkeypatch):
    """A name, and the list of its addresses."""
    addresses = list(ADDRESSES)
    resolve = socket.getaddrinfo

    def fake(host, *arguments, **options):
        if host != "models.test":
            return resolve(host, *arguments, **options)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", fake)
    return "models.test", addresses


@contextmanager
def servers(protocol, tls):
    """Run a server on the same port of each address."""
    serve = contextmanager(SERVE[protocol])
    with ExitStack() as stack:
        first = stack.enter_context(serve(FakeModel(), f"{ADDRESSES[0]}:0", tls=tls))
        port = first.url.rpartition(":")[2]
        yield first, stack.enter_context(serve(FakeModel(), f"{ADDRESSES[1]}:{port}", tls=tls))


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("protocol", SERVE)
def test_each_address_of_the_name_is_a_replica(name, protocol, tls, fast_retries, vectors_of):
    host, _ = name
    texts = [f"text {n}" for n in range(160)]
    with servers(protocol, tls) as found:
        scheme, _, port = found[0].url.replace("://127.0.0.1", "").partition(":")
        with Client(
            f"dns+{scheme}://{host}:{port}",
            "fake",
            retry=fast_retries,
            ca_file=CERTIFICATE if tls else None,
            concurrency=1,
        ) as client:
            np.testing.assert_array_equal(client.embed(texts), vectors_of(texts))

        assert [len(each.model.requests) for each in found] == [10, 10]


@pytest.mark.parametrize("protocol", SERVE)
def test_a_name_without_addresses_is_unavailable(name, protocol, fast_retries):
    host, addresses = name
    addresses.clear()

    with Client(f"dns+{protocol}://{host}", "fake", retry=fast_retries) as client:
        assert not client.ready()
        with pytest.raises(ServerUnavailable, match="no address of models.test"):
            client.embed(["a"])
