"""Addresses of a server and its replicas: URLs, and the addresses behind `dns+` names.

A headless service of Kubernetes is such a name, whose addresses change as pods come and go: each is a replica. Names
are resolved again in the background while requests are sent, and sooner after a failure. An answer without addresses
changes nothing, since the known ones may still work.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

from varlen_client.errors import InvalidUrl, ServerUnavailable
from varlen_client.waits import cancel_all

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


# Addresses of one name that are used.
MAX_ADDRESSES = 256
# Least seconds from one resolution to the next, in general and after a failure.
REFRESH_SECONDS = 10.0
HURRIED_REFRESH_SECONDS = 1.0
# Seconds that a request waits for the first addresses.
FIRST_ANSWER_SECONDS = 10.0

# Returns the addresses of a host, or raises OSError.
Resolve = Callable[[str], Awaitable[Collection[str]]]


async def resolve_host(host: str) -> Collection[str]:
    """Return the addresses of a host, all of one family, from the system's resolver.

    Raises:
        OSError: the host has no address, or no resolver answered.
    """
    # in a thread of the event loop's executor
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # the addresses of a second family belong to the same servers
    family = found[0][0]
    return dict.fromkeys(str(address[0]) for kind, *_, address in found if kind == family)


class Discovery:
    """The endpoints of a list, with one per address for each `dns+` URL."""

    def __init__(self, endpoints: Sequence[Endpoint], resolve: Resolve = resolve_host) -> None:
        self._given = tuple(endpoints)
        self._hosts = tuple(dict.fromkeys(each.host for each in endpoints if each.resolves))
        self._resolve = resolve
        self._addresses: dict[str, list[str]] = {}
        self._failures: dict[str, str] = {}
        self._known = self._current()
        # one resolution runs at a time, since the thread of a resolver cannot be cancelled
        self._resolution: asyncio.Task[None] | None = None
        self._resolved_at = -math.inf

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the known endpoints, the same object while they stay; wait only for the first.

        Raises:
            ServerUnavailable: no address is known.
        """
        self._resolve_after(REFRESH_SECONDS if self._known else HURRIED_REFRESH_SECONDS)
        if not self._known and self._resolution is not None:
            await asyncio.wait({self._resolution}, timeout=FIRST_ANSWER_SECONDS)
        if not self._known:
            reasons = [
                f"{host}: {self._failures.get(host, 'the resolver did not answer')}"
                for host in self._hosts
            ]
            raise ServerUnavailable(f"no address of {'; '.join(reasons)}")
        return self._known

    def hurry(self) -> None:
        """Resolve names soon, after a replica has failed."""
        self._resolve_after(HURRIED_REFRESH_SECONDS)

    async def close(self) -> None:
        """Stop the resolution; a later request starts it again."""
        if self._resolution is not None:
            await cancel_all([self._resolution])
            self._resolution = None

    def _resolve_after(self, seconds: float) -> None:
        is_running = self._resolution is not None and not self._resolution.done()
        now = asyncio.get_running_loop().time()
        if self._hosts and not is_running and now >= self._resolved_at + seconds:
            self._resolution = asyncio.ensure_future(self._resolve_all())

    async def _resolve_all(self) -> None:
        await asyncio.gather(*map(self._resolve_one, self._hosts))
        self._resolved_at = asyncio.get_running_loop().time()
        current = self._current()
        if current != self._known:
            self._known = current

    async def _resolve_one(self, host: str) -> None:
        try:
            # the brackets of an IPv6 address belong to the URL
            found = await self._resolve(host.strip("[]"))
        except (OSError, UnicodeError) as error:
            self._failures[host] = str(error)
            return
        kept = [each for each in self._addresses.get(host, ()) if each in found]
        added = [each for each in found if each not in kept]
        # with more addresses than are used, clients choose different ones
        random.shuffle(added)
        self._addresses[host] = [*kept, *added][:MAX_ADDRESSES]

    def _current(self) -> tuple[Endpoint, ...]:
        """Return one endpoint per known address, without repetitions."""
        found: dict[Endpoint, None] = {}
        for endpoint in self._given:
            if endpoint.resolves:
                addresses = self._addresses.get(endpoint.host, ())
                found |= dict.fromkeys(map(endpoint.at, addresses))
            else:
                found[endpoint] = None
        return tuple(found)
