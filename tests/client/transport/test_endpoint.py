"""Parsing the server's address."""

import pytest

from varlen_client import Client, InvalidUrl
from varlen_client.transport.endpoint import Endpoint


@pytest.mark.parametrize(
    ("url", "protocol", "tls", "target"),
    [
        ("grpc://127.0.0.1:8001", "grpc", False, "127.0.0.1:8001"),
        ("grpcs://host", "grpc", True, "host:8001"),
        ("http://host/", "http", False, "host:8000"),
        ("https://host:443/models", "http", True, "host:443/models"),
        ("grpc://[::1]:9", "grpc", False, "[::1]:9"),
    ],
)
def test_the_scheme_selects_protocol_and_tls(url, protocol, tls, target):
    endpoint = Endpoint.parse(url)

    assert (endpoint.protocol, endpoint.tls, endpoint.target) == (protocol, tls, target)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8001",
        "localhost",
        "ftp://host",
        "grpc:host",
        "grpc://",
        "http://h:99999",
        "grpc://host/path",
        "http://host?x=1",
        "",
    ],
)
def test_refuses_an_invalid_url(url):
    with pytest.raises(InvalidUrl):
        Client(url)


def test_metrics_are_expected_on_port_8002_of_the_same_host():
    url = Endpoint.parse("grpcs://host:443").default_metrics_url

    assert url == "http://host:8002/metrics"
