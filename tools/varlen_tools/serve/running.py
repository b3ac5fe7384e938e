"""A server and its gateway, from their start until one of them ends."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from varlen_client.cli.options import print_message
from varlen_client.cli.progress import show_stage
from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.app import create_app
from varlen_client.gateway.http_server import GRACE_SECONDS, GatewayServer
from varlen_tools.local_server import LOOPBACK, LocalServer, ServerError, loading_stage
from varlen_tools.run_server import is_taken
from varlen_tools.serve.examples import Addresses, Model, curl_line, read_model
from varlen_tools.serve.models import ServeError
from varlen_tools.serve.server import LOAD_SECONDS, ServerCommand, start_server

_POLL_SECONDS = 0.5
# Time between two lines about a long load, where stderr is no terminal.
_LINE_SECONDS = 10.0
# Addresses that stand for all of this machine, as clients here call them.
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104  # read, not bound


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a gateway and of its server.

    Attributes:
        host: address of the gateway, as clients on this machine write it, with its port.
        server: first of the server's three ports on loopback.
    """

    gateway: socket.socket
    host: str
    server: int

    @classmethod
    @contextlib.contextmanager
    def taken(cls, host: str, port: int, server_port: int) -> Iterator[Ports]:
        """Listen for the gateway, so that no other process takes its port while models load.

        Raises:
            ServeError: a port is in use, or the address is not one of this machine.
        """
        if server_port <= port < server_port + 3:
            raise ServeError(f"--port {port} is one of the server's three, from {server_port}")
        for each in range(server_port, server_port + 3):
            if is_taken(LOOPBACK, each):
                raise ServeError(f"port {each} is in use; the server needs three: --server-port")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ServeError(f"port {port} is in use; give a free one: --port") from None
            raise ServeError(f"cannot listen on {host}: {error.strerror}") from None
        with listener:
            shown = _ANY_ADDRESS.get(host, f"[{host}]" if ":" in host else host)
            yield cls(listener, f"{shown}:{port}", server_port)


def run(
    command: ServerCommand,
    folders: Sequence[Path],
    ports: Ports,
    gateway_settings: GatewaySettings,
    *,
    began: float,
) -> None:
    """Run the server and the gateway until a signal ends the gateway.

    Args:
        gateway_settings: settings of the gateway, whose URL is replaced by the server's.
        began: time of `time.monotonic` from which the start counts.

    Raises:
        ServeError: a model cannot be served.
        ServerError: the server has ended by itself.
    """
    models = [read_model(folder) for folder in folders]
    # what auto-completion would do takes a second and a half of a start
    is_whole = all(model is not None and model.has_whole_config for model in models)
    arguments = ["--disable-auto-complete-config"] if is_whole else []
    with (
        start_server(command, folders, arguments, first_port=ports.server) as server,
        _shown_end(server),
    ):
        _wait_ready(server, [folder.name for folder in folders])
        settings = replace(gateway_settings, url=server.grpc_url)
        gateway = _Gateway(create_app(settings), settings, log_level="warning")
        _print_ready(
            models,
            server,
            ports,
            seconds=time.monotonic() - began,
            has_keys=bool(settings.api_keys),
        )
        threading.Thread(target=_end_with, args=(server, gateway), daemon=True).start()
        gateway.run_alone([ports.gateway])
        if not gateway.started:
            raise ServerError("the gateway has not started")
        if not server.is_running:
            raise ServerError(f"the server has ended\n{server.log_tail()}")


class _Gateway(GatewayServer):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        with _showing(f"ending: requests in progress have up to {GRACE_SECONDS} s"):
            await super().shutdown(sockets)


def _wait_ready(server: LocalServer, names: Sequence[str]) -> None:
    """Wait until a server has loaded its models, and show what they do.

    A terminal has one line, which changes. Elsewhere a line comes first, and others while a load is long.
    """
    loading = f"loading {', '.join(names)}"
    began = said = time.monotonic()
    with _showing(loading) as show:

        def report() -> None:
            nonlocal said
            stage, now = loading_stage(server.log()) or loading, time.monotonic()
            show(stage)
            if not _is_terminal() and now - said >= _LINE_SECONDS:
                print_message(f"{stage}, after {now - began:.0f} s")
                said = now

        server.wait_ready(LOAD_SECONDS, report)


@contextlib.contextmanager
def _showing(stage: str) -> Iterator[Callable[[str], None]]:
    if not _is_terminal():
        print_message(stage)
    with show_stage(stage) as show:
        yield show


def _is_terminal() -> bool:
    return Console(stderr=True).is_terminal


@contextlib.contextmanager
def _shown_end(server: LocalServer) -> Iterator[None]:
    try:
        yield
    finally:
        if server.is_running:
            with _showing("ending the server"):
                server.stop()


def _end_with(server: LocalServer, gateway: GatewayServer) -> None:
    while server.is_running:
        time.sleep(_POLL_SECONDS)
    gateway.should_exit = True


def _print_ready(
    models: Sequence[Model | None],
    server: LocalServer,
    ports: Ports,
    *,
    seconds: float,
    has_keys: bool,
) -> None:
    at = Addresses(ports.host, server.http_url.removeprefix("http://"), has_keys)
    print(f"ready after {seconds:.1f} s")
    print(f"  http://{ports.host}   a page to try the models; OpenAI, TEI, Cohere: /docs")
    print(f"  {server.grpc_url}, {server.http_url}   KServe v2: tritonclient, perf_analyzer")
    print(f"  {server.metrics_url}   metrics; log of the server: {server.log_file}")
    for model in filter(None, models):
        print(f"{model.name}: {model.task}")
        print(f"  {curl_line(model, at)}")
    print("Ctrl-C ends it", flush=True)
