"""Floods of the gateway by clients without a key, and the time of `/health` meanwhile."""

from __future__ import annotations

import http.client
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import TypeAlias

Address: TypeAlias = tuple[str, int]
# Sends one flood to an address until the time of `time.monotonic`.
Flood: TypeAlias = Callable[[Address, float], None]

# A probe gives up after it.
_PROBE_SECONDS = 30.0
_PROBE_PAUSE = 0.02
_POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_MANY = 970


@dataclass(frozen=True, slots=True)
class HealthTimes:
    """Seconds of the answers of `/health` beside a flood, in order of size.

    Attributes:
        answers: seconds of the probes that got status 200.
        failed: number of other probes.
    """

    answers: list[float]
    failed: int

    @property
    def median(self) -> float:
        """Median of the answers; infinite without any."""
        return self.answers[len(self.answers) // 2] if self.answers else float("inf")

    @property
    def longest(self) -> float:
        """Time of the slowest answer; infinite if a probe failed."""
        return self.answers[-1] if self.answers and not self.failed else float("inf")


def one_byte_chunks(address: Address, until: float) -> None:
    """Four connections at a time send bodies of 1.2 MB in chunks of one byte."""
    _in_threads(4, _repeat(_CHUNKED + b"1\r\na\r\n" * 1_200_000 + b"0\r\n\r\n"), address, until)


def chunk_extensions(address: Address, until: float) -> None:
    """Four connections at a time send chunks with extensions of 64 KiB."""
    chunk = b"1;a=" + b"b" * (64 << 10) + b"\r\na\r\n"
    _in_threads(4, _repeat(_CHUNKED + chunk * 64), address, until)


def large_heads(address: Address, until: float) -> None:
    """Four connections at a time send heads of 10,000 fields."""
    fields = b"".join(b"x-%d: 1\r\n" % number for number in range(10_000))
    _in_threads(4, _repeat(_POST + fields + b"\r\n"), address, until)


def pipelined(address: Address, until: float) -> None:
    """Four connections at a time send 10,000 requests before they read an answer."""
    _in_threads(4, _repeat(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n" * 10_000), address, until)


def refused_bodies(address: Address, until: float) -> None:
    """Sixteen connections at a time send large bodies that are refused at their head."""
    head = _POST + b"Authorization: Bearer wrong\r\nContent-Length: %d\r\n\r\n" % (1 << 30)
    _in_threads(16, _repeat(head + b"a" * (4 << 20)), address, until)


def slow_bodies(address: Address, until: float) -> None:
    """970 connections send a byte of a body each 5 s, and connect again."""
    _many(_POST + b"Content-Length: 4000\r\n\r\n", address, until)


def slow_heads(address: Address, until: float) -> None:
    """970 connections send a byte of a head each 5 s, and connect again."""
    _many(_POST + b"x: ", address, until)


FLOODS: Mapping[str, Flood] = {
    flood.__name__: flood
    for flood in (
        one_byte_chunks,
        chunk_extensions,
        large_heads,
        pipelined,
        refused_bodies,
        slow_bodies,
        slow_heads,
    )
}


def health_beside(flood: Flood, address: Address, seconds: float) -> HealthTimes:
    """Return how long `/health` takes while a process of its own sends a flood."""
    with _sending(flood, address, seconds):
        # the flood has begun
        time.sleep(min(1.0, seconds / 4))
        return _probe(address, time.monotonic() + seconds)


@contextmanager
def _sending(flood: Flood, address: Address, seconds: float) -> Iterator[None]:
    # a second for the start of the process
    until = time.monotonic() + seconds + 2.0
    process = multiprocessing.get_context("spawn").Process(
        target=_flood_gently, args=(flood, address, until)
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _flood_gently(flood: Flood, address: Address, until: float) -> None:
    # clients on other machines take none of the gateway's processors
    os.nice(10)
    flood(address, until)


def _probe(address: Address, until: float) -> HealthTimes:
    answers, failed = [], 0
    while time.monotonic() < until:
        began = time.monotonic()
        connection = http.client.HTTPConnection(*address, timeout=_PROBE_SECONDS)
        try:
            connection.request("GET", "/health")
            is_right = connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            is_right = False
        finally:
            connection.close()
        answers.append(time.monotonic() - began) if is_right else None
        failed += not is_right
        time.sleep(_PROBE_PAUSE)
    return HealthTimes(sorted(answers), failed)


def _in_threads(
    count: int, client: Callable[[Address, Event], None], address: Address, until: float
) -> None:
    over = Event()
    threads = [Thread(target=client, args=(address, over), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(max(until - time.monotonic(), 0.0))
    over.set()


def _repeat(data: bytes) -> Callable[[Address, Event], None]:
    """Return a client that repeats: connect, send these bytes, read to the end."""

    def client(address: Address, over: Event) -> None:
        while not over.is_set():
            with suppress(OSError), socket.create_connection(address, timeout=5.0) as connection:
                with suppress(OSError):
                    connection.sendall(data)
                while connection.recv(1 << 16):
                    pass

    return client


def _many(head: bytes, address: Address, until: float) -> None:
    with ExitStack() as stack:
        connections: list[socket.socket | None] = [None] * _MANY
        stack.callback(_close, connections)
        while time.monotonic() < until:
            pause = time.monotonic() + 5.0
            for place, connection in enumerate(connections):
                connections[place] = _next_byte(connection, head, address)
            time.sleep(max(min(pause, until) - time.monotonic(), 0.0))


def _next_byte(
    connection: socket.socket | None, head: bytes, address: Address
) -> socket.socket | None:
    """Send a byte on a connection, or open it; return the connection that is open."""
    try:
        if connection is None:
            connection = socket.create_connection(address, timeout=5.0)
            connection.sendall(head)
        connection.sendall(b"a")
    except OSError:
        if connection is not None:
            connection.close()
        return None
    return connection


def _close(connections: Sequence[socket.socket | None]) -> None:
    for each in connections:
        if each is not None:
            each.close()
