"""A gateway's HTTP server in a thread, and clients that send it bytes."""

import json
import socket
import threading
import time
from contextlib import contextmanager

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.http_server import GatewayServer

# Longer than anything here takes.
SECONDS = 20.0


@contextmanager
def served(app, **settings):
    """Serve an application, and yield its host and port."""
    given = GatewaySettings(url="grpc://127.0.0.1:1", **settings)
    with running(GatewayServer(app, given, log_level="critical", lifespan="off")) as address:
        yield address


@contextmanager
def running(server):
    """Run a server in a thread, and yield its host and port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        end = time.monotonic() + SECONDS
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


async def echo(scope, receive, send):
    """Answer with the request.

    The answer is a stream on the path /stream; on /unread the body is not read.
    """
    body, more = b"", scope["path"] != "/unread"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    request = {
        "method": scope["method"],
        "path": scope["path"],
        "headers": [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]],
        "body": body.decode("latin-1"),
    }
    answer = json.dumps(request).encode()
    headers = [(b"content-length", b"%d" % len(answer))] if scope["path"] != "/stream" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    half = len(answer) // 2
    await send({"type": "http.response.body", "body": answer[:half], "more_body": True})
    await send({"type": "http.response.body", "body": answer[half:]})


class RawClient:
    """A connection on which a test sends bytes and reads answers."""

    def __init__(self, address):
        self._socket = socket.create_connection(address, timeout=SECONDS)
        self._read = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def send(self, data):
        """Send bytes; return this."""
        self._socket.sendall(data)
        return self

    def answer(self):
        """Return status, fields and body of the next answer, whose head has its length."""
        head = self._until(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")[:-2]
        found = {
            name.lower(): value for name, _, value in (each.partition(": ") for each in fields)
        }
        length = int(found.get("content-length", 0))
        while len(self._read) < length:
            self._read_more()
        body, self._read = self._read[:length], self._read[length:]
        return int(line.split()[1]), found, body

    def ends(self):
        """Return whether the server has ended the connection."""
        self._socket.setblocking(False)
        try:
            return not self._socket.recv(1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        finally:
            self._socket.settimeout(SECONDS)

    def rest(self):
        """Return what comes until the connection ends."""
        while part := self._socket.recv(1 << 16):
            self._read += part
        rest, self._read = self._read, b""
        return rest

    def _until(self, end):
        while end not in self._read:
            self._read_more()
        found, _, self._read = self._read.partition(end)
        return found + end

    def _read_more(self):
        part = self._socket.recv(1 << 16)
        assert part, f"the connection has ended after {self._read!r}"
        self._read += part
