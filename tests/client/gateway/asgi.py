"""Calls a gateway as its HTTP server does, on a clock that waits for nothing."""

import asyncio
import json
import selectors

HEADERS = {"Content-Type": "application/json"}


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once when all its tasks wait."""

    def __init__(self):
        self.now = 0.0
        super().__init__(_InstantSelector(self))

    def time(self):
        return self.now


class _InstantSelector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        events = super().select(0)
        if not events and timeout:
            self._loop.now += timeout
        return events


def run_virtual(coroutine):
    """Return the result of a coroutine, and the seconds that it took."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(coroutine), loop.now
    finally:
        loop.close()


class Exchange:
    """One request to an application, and its answer so far.

    Args:
        headers: names and values; values may be bytes.
        body: JSON of the body; None never comes.
        read_messages: number of messages of the answer that the client reads; None is all.
        trickle: bytes of an endless body that come each second.
    """

    def __init__(
        self, path, body=None, *, method="POST", headers=HEADERS, read_messages=None, trickle=0
    ):
        self.sent, self._read, self._trickle = [], read_messages, trickle
        self.sent_before_reading = 0
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.lower().encode(), _bytes(each)) for name, each in headers.items()],
        }
        self._messages = [] if body is None else [json.dumps(body).encode()]

    async def run(self, app):
        """Run the request to its end, and return this."""
        await app(self.scope, self._receive, self._send)
        return self

    async def _receive(self):
        self.sent_before_reading = self.sent_before_reading or len(self.sent)
        if self._messages:
            return {"type": "http.request", "body": self._messages.pop(), "more_body": False}
        if self._trickle:
            await asyncio.sleep(1.0)
            return {"type": "http.request", "body": bytes(self._trickle), "more_body": True}
        return await asyncio.get_running_loop().create_future()

    async def _send(self, message):
        if self._read is not None and len(self.sent) >= self._read:
            await asyncio.get_running_loop().create_future()
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self):
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def error(self):
        return json.loads(self.body)["error"]["message"]


def _bytes(value):
    return value if isinstance(value, bytes) else value.encode()
