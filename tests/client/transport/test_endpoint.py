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


@pytest.mark.parametrize(
    "url, ports",
    [
        ("grpc://host", [8002]),
        ("http://host", [8002]),
        ("grpc://host:18001", [18002, 8002]),
        ("http://host:18000", [18002, 8002]),
        ("grpcs://host:443", [444, 8002]),
    ],
)
def test_metrics_are_expected_after_the_ports_of_http_and_grpc_or_on_port_8002(url, ports):
    expected = tuple(f"http://host:{port}/metrics" for port in ports)

    assert Endpoint.parse(url).metrics_urls == expected
