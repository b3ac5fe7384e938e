"""uvicorn with the gateway's own connections."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from varlen_client.gateway.connections import ACCEPTED_TOGETHER, Connections
from varlen_client.gateway.http_connection import LimitedConnection
from varlen_client.gateway.settings import GatewaySettings

# Time of requests in progress to end when the gateway stops.
GRACE_SECONDS = 30
# Longer than clients and balancers keep an idle connection, which they would otherwise use as it is closed.
_KEEP_ALIVE_SECONDS = 75
# Connections that wait to be accepted.
_QUEUED_CONNECTIONS = 2048


class GatewayServer(uvicorn.Server):
    """An HTTP server of one gateway.

    Args:
        app: application of the gateway.
        settings: its settings.
        options: more options of uvicorn.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings, **options: Any) -> None:
        connections = Connections(max_per_address=settings.max_connections_per_address)
        config = uvicorn.Config(
            app,
            http=partial(LimitedConnection, connections),  # type: ignore[arg-type]
            ws="none",
            access_log=False,
            server_header=False,
            backlog=ACCEPTED_TOGETHER,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            **options,
        )
        super().__init__(config)
        self._is_alone = False

    def run_alone(self, sockets: list[socket.socket] | None = None) -> None:
        """Run in a process that does nothing else: no collection visits the imported modules."""
        self._is_alone = True
        self.run(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; a connection that has not ended within the grace period is closed."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.close_now()  # type: ignore[union-attr]
        await asyncio.sleep(0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; more connections may wait than asyncio accepts in one turn of its loop."""
        await super().startup(sockets)
        if self._is_alone:
            # Not before uvicorn handles signals: what their handlers raise is lost in a collection.
            gc.collect()
            gc.freeze()
        for listener in (each for server in self.servers for each in server.sockets):
            with socket.socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(_QUEUED_CONNECTIONS)
