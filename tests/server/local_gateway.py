"""A gateway in a thread of this process, on a free loopback port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.app import create_app
from varlen_client.gateway.http_server import GatewayServer
from varlen_tools.local_server import LOOPBACK, reserved_port

from .serving import wait_until


@contextmanager
def local_gateway(settings: GatewaySettings) -> Iterator[str]:
    """Run a gateway, and yield its host and port."""
    # free again for uvicorn, which shares no port
    with reserved_port() as port:
        pass
    app = create_app(settings)
    running = GatewayServer(app, settings, host=LOOPBACK, port=port, log_level="warning")
    thread = threading.Thread(target=running.run)
    thread.start()
    wait_until(lambda: running.started, "the gateway has started")
    try:
        yield f"{LOOPBACK}:{port}"
    finally:
        running.should_exit = True
        thread.join()
