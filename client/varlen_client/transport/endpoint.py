"""The address of a server: protocol, host, port, TLS, and how its host is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

from varlen_client.errors import InvalidUrl

METRICS_PORT = 8002
# Beginning of a URL whose host has one replica per address.
DNS_PREFIX = "dns+"

_SCHEMES: dict[str, tuple[Literal["grpc", "http"], bool, int]] = {
    # scheme: (protocol, TLS, the server's default port)
    "grpc": ("grpc", False, 8001),
    "grpcs": ("grpc", True, 8001),
    "http": ("http", False, 8000),
    "https": ("http", True, 8000),
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server address, read from a URL such as `grpc://127.0.0.1:8001`.

    Attributes:
        resolves: whether each address of the host is a replica (`dns+grpc://`).
        address: IP address to connect to; None leaves the choice to the transport.
    """

    protocol: Literal["grpc", "http"]
    host: str
    port: int
    tls: bool
    path: str
    resolves: bool = False
    address: str | None = None

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Return the address in `url`; a missing port is the protocol's default.

        Raises:
            InvalidUrl: the scheme is not grpc, grpcs, http or https, perhaps after `dns+`; the host is missing;
                the port is invalid; or the URL has other parts.
        """
        parts = urlsplit(url.removeprefix(DNS_PREFIX))
        if parts.scheme not in _SCHEMES or "://" not in url:
            raise InvalidUrl(f"url {url!r} must start with grpc://, grpcs://, http:// or https://")
        protocol, tls, default_port = _SCHEMES[parts.scheme]
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidUrl(f"url {url!r}: {error}") from None
        path = parts.path.rstrip("/")
        if not host:
            raise InvalidUrl(f"url {url!r} has no host")
        if parts.query or parts.fragment or parts.username or (path and protocol == "grpc"):
            raise InvalidUrl(f"url {url!r} has more than scheme://host:port")
        return cls(
            protocol=protocol,
            host=f"[{host}]" if ":" in host else host,
            port=default_port if port is None else port,
            tls=tls,
            path=path,
            resolves=url.startswith(DNS_PREFIX),
        )

    @classmethod
    def parse_all(cls, urls: str | Sequence[str]) -> tuple[Endpoint, ...]:
        """Return the addresses of a server's replicas, from one URL or several.

        Raises:
            InvalidUrl: a URL is invalid, there is none, or their protocols differ.
        """
        endpoints = tuple(map(cls.parse, [urls] if isinstance(urls, str) else urls))
        if not endpoints:
            raise InvalidUrl("no url was given; at least one")
        if len({endpoint.protocol for endpoint in endpoints}) > 1:
            raise InvalidUrl(
                f"urls {list(urls)} have several protocols; all are grpc or all are http"
            )
        return endpoints

    def at(self, address: str) -> Endpoint:
        """Return the endpoint of one address of the host."""
        return replace(self, resolves=False, address=address)

    @property
    def target(self) -> str:
        """host:port and the path, in the form that tritonclient expects."""
        return f"{self.host}:{self.port}{self.path}"

    @property
    def peer(self) -> str:
        """host:port to connect to, with the IP address as host if there is one."""
        if self.address is None:
            return f"{self.host}:{self.port}"
        return (
            f"[{self.address}]:{self.port}"
            if ":" in self.address
            else f"{self.address}:{self.port}"
        )

    @property
    def label(self) -> str:
        """Name of the server in messages."""
        return self.target if self.address is None else f"{self.peer} ({self.target})"

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """URLs of the metrics page: at the port after the gRPC port, else at 8002."""
        following = self.port + (1 if self.protocol == "grpc" else 2)
        ports = dict.fromkeys((following, METRICS_PORT))
        return tuple(f"http://{self.host}:{port}/metrics" for port in ports)
