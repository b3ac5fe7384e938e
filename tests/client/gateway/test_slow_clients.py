"""Clients that send half a request, or read no answer, hold no place for ever."""

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from varlen_client.gateway import edge
from varlen_client.gateway.connections import HEAD_SECONDS, READ_SECONDS, LimitedConnection

from .asgi import Exchange, run_virtual

EMBED = {"model": "embedder", "inputs": "a"}
STREAM = {"model": "writer", "prompt": "a", "stream": True, "max_tokens": 1000}
KEY = {"Content-Type": "application/json", "Authorization": "Bearer k"}


@pytest.mark.parametrize("read", [0, 1, 5], ids=["nothing", "head", "some"])
def test_a_stream_that_is_not_read_gives_its_place_back(make_app, read):
    app = make_app(max_requests=1, timeout_seconds=5.0)

    async def run():
        stuck = await Exchange("/v1/completions", STREAM, read_messages=read).run(app)
        return stuck, await Exchange("/embed", EMBED).run(app)

    (stuck, after), seconds = run_virtual(run())

    assert (len(stuck.sent), after.status) == (read, 200)
    assert seconds == 5.0 + edge._LAST_SECONDS


def test_an_answer_that_never_begins_is_a_timeout(make_app, calls):
    calls.delay = 1e6

    late, seconds = run_virtual(Exchange("/embed", EMBED).run(make_app(timeout_seconds=5.0)))

    assert (late.status, late.error) == (504, "the answer was not complete in time")
    assert seconds == 5.0 + edge._LAST_SECONDS
    assert calls.running == 0


def test_a_body_that_does_not_come_ends_in_time(make_app):
    late, seconds = run_virtual(Exchange("/embed", headers={"Content-Length": "9"}).run(make_app()))

    assert (late.status, late.headers["connection"]) == (408, "close")
    assert seconds == edge._BODY_SECONDS + edge._DROP_SECONDS


@pytest.mark.parametrize(
    "headers, status, message",
    [
        ({"Content-Length": "9"}, 401, "the request has no valid API key"),
        (KEY | {"Content-Length": "1001"}, 413, "the body is larger than 1000 bytes"),
        (KEY | {"Content-Length": "9" * 5000}, 413, "the body is larger than 1000 bytes"),
        (KEY | {"Content-Length": "-1"}, 400, "Content-Length is no number"),
        (KEY | {"Content-Length": "1e3"}, 400, "Content-Length is no number"),
        (KEY | {"Content-Length": "1,2"}, 400, "Content-Length is no number"),
        (KEY | {"Content-Length": "²"}, 400, "Content-Length is no number"),
        (
            KEY | {"Content-Length": "9", "Transfer-Encoding": "chunked"},
            400,
            "Content-Length and Transfer-Encoding; send one",
        ),
    ],
    ids="key large huge negative float list digit chunked".split(),
)
def test_a_body_that_is_refused_at_its_head_is_not_read(make_app, headers, status, message):
    app = make_app(api_keys=("k",), max_body_bytes=1000)

    refused, seconds = run_virtual(Exchange("/embed", headers=headers).run(app))

    assert refused.status == status
    assert message in refused.error
    assert refused.headers["connection"] == "close"
    # the client has the whole answer, and then some time to send what is not read
    assert refused.sent_before_reading == 2
    assert len(refused.body) == int(refused.headers["content-length"])
    assert seconds == edge._DROP_SECONDS


def test_a_refused_body_that_comes_to_its_end_is_not_waited_for(make_app):
    app = make_app(api_keys=("k",))

    refused, seconds = run_virtual(
        Exchange("/embed", EMBED, headers={"Content-Length": "9"}).run(app)
    )

    assert (refused.status, seconds) == (401, 0.0)


def test_a_length_up_to_the_limit_is_served(make_app):
    headers = KEY | {"Content-Length": "0001000"}

    served, _ = run_virtual(
        Exchange("/embed", EMBED, headers=headers).run(make_app(max_body_bytes=1000))
    )

    assert served.status == 200
    assert "connection" not in served.headers


def test_a_request_above_the_most_is_refused_without_its_body(make_app):
    app = make_app(max_requests=1)
    inner = []

    async def run():
        outer = Exchange("/v1/completions", STREAM)
        send = outer._send

        async def send_and_ask(message):
            if not inner:
                inner.append(Exchange("/embed", EMBED, headers=KEY | {"Content-Length": "40"}))
                await inner[0].run(app)
            await send(message)

        outer._send = send_and_ask
        await outer.run(app)

    run_virtual(run())

    assert (inner[0].status, inner[0].sent_before_reading) == (503, 2)
    assert inner[0].headers["connection"] == "close"
    assert inner[0].headers["retry-after"] == "1"


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_a_body_of_another_method_is_not_read(make_app, method):
    headers = {"Content-Length": "999"}

    refused, _ = run_virtual(Exchange("/embed", method=method, headers=headers).run(make_app()))

    assert (refused.status, refused.sent_before_reading) == (405, 0)
    assert (refused.headers["connection"], refused.headers["allow"]) == ("close", "POST")


@pytest.mark.parametrize(
    "key, encoding, status",
    [
        ("schlüssel", "utf-8", 200),
        ("schlüssel", "latin-1", 200),
        ("鍵", "utf-8", 200),
        ("schlussel", "utf-8", 401),
        ("schlÃ¼ssel", "utf-8", 401),
    ],
)
def test_a_key_may_have_every_character(make_app, key, encoding, status):
    app = make_app(api_keys=("schlüssel", "鍵"))
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {key}".encode(encoding),
    }

    answered, _ = run_virtual(Exchange("/embed", EMBED, headers=headers).run(app))

    assert answered.status == status


class FakeTimers:
    """Stands in for the event loop of a connection: timers that a test lets pass."""

    def __init__(self):
        self.now, self._timers = 0.0, []

    def call_later(self, seconds, call):
        timer = FakeTimer(self.now + seconds, call)
        self._timers.append(timer)
        return timer

    def create_task(self, coroutine, **_):
        coroutine.close()
        return self

    def add_done_callback(self, _):
        pass

    def wait(self, seconds):
        self.now += seconds
        for timer in self._timers:
            if timer.at <= self.now and not timer.is_done:
                timer.is_done = True
                timer.call()


class FakeTimer:
    def __init__(self, at, call):
        self.at, self.call, self.is_done = at, call, False

    def cancel(self):
        self.is_done = True


class FakeTransport:
    """Stands in for the socket of a connection."""

    def __init__(self):
        self.is_aborted = False

    def get_extra_info(self, _):
        return None

    def abort(self):
        self.is_aborted = True

    def is_closing(self):
        return self.is_aborted

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


async def answers_nothing(scope, receive, send):
    """Stand in for an application; tests start none of its tasks."""


class Clients:
    """Opens connections of one server."""

    def __init__(self, max_connections=10):
        self.timers, self._state = FakeTimers(), ServerState()
        self._config = Config(app=answers_nothing, log_config=None)
        self._max_connections, self.idle = max_connections, {}

    def connect(self):
        connection = LimitedConnection(self._config, self._state, app_state={}, _loop=self.timers)
        connection.max_connections, connection.idle = self._max_connections, self.idle
        connection.connection_made(FakeTransport())
        return connection


HEAD = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST", HEAD[:-1]], ids=["silent", "line", "almost"])
def test_a_head_that_does_not_end_is_closed(sent):
    clients = Clients()
    connection = clients.connect()
    if sent:
        connection.data_received(sent)

    clients.timers.wait(HEAD_SECONDS - 1)
    assert not connection.transport.is_aborted
    if sent:
        # each byte starts no new wait
        connection.data_received(b"\r")
    clients.timers.wait(1)
    assert connection.transport.is_aborted


def test_a_request_with_a_whole_head_is_not_closed_here():
    clients = Clients()
    connection = clients.connect()
    connection.data_received(HEAD)

    clients.timers.wait(100 * HEAD_SECONDS)

    assert not connection.transport.is_aborted


def test_the_head_of_a_next_request_has_its_time_too():
    clients = Clients()
    connection = clients.connect()
    connection.data_received(HEAD + b"12345")
    connection.cycle.response_complete = True
    clients.timers.wait(100 * HEAD_SECONDS)
    assert not connection.transport.is_aborted

    connection.data_received(b"PO")
    clients.timers.wait(HEAD_SECONDS)

    assert connection.transport.is_aborted


def test_a_client_that_takes_nothing_of_its_answer_is_closed():
    clients = Clients()
    connection = clients.connect()
    connection.data_received(HEAD)
    connection.pause_writing()
    clients.timers.wait(READ_SECONDS - 1)
    connection.resume_writing()
    clients.timers.wait(READ_SECONDS)
    assert not connection.transport.is_aborted

    connection.pause_writing()
    clients.timers.wait(READ_SECONDS)

    assert connection.transport.is_aborted


def open_ones(connections):
    return [not each.transport.is_aborted for each in connections]


def test_above_the_most_connections_the_one_that_is_idle_longest_is_closed():
    clients = Clients(max_connections=3)
    busy, silent, used = (clients.connect() for _ in range(3))
    busy.data_received(HEAD)
    used.data_received(HEAD + b"12345")
    used.cycle.response_complete = True
    used.on_response_complete()
    assert list(clients.idle) == [silent, used]

    connections = [busy, silent, used, clients.connect()]
    assert open_ones(connections) == [True, False, True, True]
    silent.connection_lost(OSError())

    connections.append(clients.connect())
    assert open_ones(connections) == [True, False, False, True, True]


def test_requests_in_progress_are_not_closed_for_new_connections():
    clients = Clients(max_connections=2)
    busy = [clients.connect() for _ in range(2)]
    for each in busy:
        each.data_received(HEAD)

    new = clients.connect()

    assert open_ones([*busy, new]) == [True, True, False]
    new.connection_lost(OSError())
    busy[0].connection_lost(OSError())
    assert open_ones([clients.connect()]) == [True]


def test_a_connection_that_is_lost_has_no_timers():
    clients = Clients()
    connection = clients.connect()
    connection.pause_writing()
    connection.connection_lost(OSError())

    clients.timers.wait(10 * READ_SECONDS)

    assert not connection.transport.is_aborted
