"""The addresses behind `dns+` URLs: each address of the name is a replica.

A headless service of Kubernetes is such a name, whose addresses change as pods come and go. Names are resolved again in
the background while requests are sent, and sooner after a failure. An answer without addresses changes nothing, since
the known ones may still work.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence

from varlen_client.errors import ServerUnavailable
from varlen_client.transport.endpoint import Endpoint
from varlen_client.waits import cancel_all

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
