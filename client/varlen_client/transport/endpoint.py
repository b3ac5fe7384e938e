"""The server's address: protocol, host, port and TLS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from varlen_client.errors import InvalidUrl

METRICS_PORT = 8002

_SCHEMES: dict[str, tuple[Literal["grpc", "http"], bool, int]] = {
    # scheme: (protocol, TLS, the server's default port)
    "grpc": ("grpc", False, 8001),
    "grpcs": ("grpc", True, 8001),
    "http": ("http", False, 8000),
    "https": ("http", True, 8000),
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server address, read from a URL such as `grpc://127.0.0.1:8001`."""

    protocol: Literal["grpc", "http"]
    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Return the address in `url`; a missing port is the protocol's default.

        Raises:
            InvalidUrl: the scheme is not grpc, grpcs, http or https; the host is missing; the port
                is invalid; or the URL has other parts.
        """
        parts = urlsplit(url)
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

    @property
    def target(self) -> str:
        """host:port and the path, in the form that tritonclient expects."""
        return f"{self.host}:{self.port}{self.path}"

    @property
    def default_metrics_url(self) -> str:
        """URL of the metrics page of a server with default ports."""
        return f"http://{self.host}:{METRICS_PORT}/metrics"
