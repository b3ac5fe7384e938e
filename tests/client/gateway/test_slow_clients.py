"""Clients that send half a request, or read no answer, hold no place for ever."""

from functools import partial

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from varlen_client.gateway import connections as connections_module
from varlen_client.gateway import edge
from varlen_client.gateway.connections import HEALTH_CONNECTIONS, Connection, Connections
from varlen_client.gateway.http_server import (
    DROP_SECONDS,
    DROP_STEP_SECONDS,
    HEAD_SECONDS,
    READ_SECONDS,
    LimitedConnection,
)

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
    assert "the body came too slowly; allowed: 1024 bytes each second or more" in late.error
    assert seconds == edge._BODY_STEP_SECONDS


@pytest.mark.parametrize(
    "bytes_each_second, seconds", [(1000, 10), (1200, 60), (1e6, 60)], ids=["slow", "least", "fast"]
)
def test_a_body_has_a_least_rate_and_a_longest_time(make_app, bytes_each_second, seconds):
    endless = Exchange("/embed", headers={}, trickle=int(bytes_each_second))
    app = make_app(max_body_bytes=1 << 30)

    late, took = run_virtual(endless.run(app))

    assert (late.status, took) == (408, seconds)


@pytest.mark.parametrize(
    "headers, status, message",
    [
        ({"Content-Length": "9"}, 401, "the request has no valid API key"),
        (
            KEY | {"Content-Length": "1001"},
            413,
            "the body is larger than 1000 bytes (--max-body-bytes)",
        ),
        (
            KEY | {"Content-Length": "9" * 18},
            413,
            "the body is larger than 1000 bytes (--max-body-bytes)",
        ),
    ],
    ids="key large huge".split(),
)
def test_a_body_that_is_refused_at_its_head_is_not_read(make_app, headers, status, message):
    app = make_app(api_keys=("k",), max_body_bytes=1000)

    refused, seconds = run_virtual(Exchange("/embed", headers=headers).run(app))

    assert refused.status == status
    assert message in refused.error
    assert refused.headers["connection"] == "close"
    assert refused.sent_before_reading == 0
    assert len(refused.body) == int(refused.headers["content-length"])
    assert seconds == 0.0


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
                inner.append(
                    Exchange("/v1/embeddings", EMBED, headers=KEY | {"Content-Length": "40"})
                )
                await inner[0].run(app)
            await send(message)

        outer._send = send_and_ask
        await outer.run(app)

    run_virtual(run())

    assert (inner[0].status, inner[0].sent_before_reading) == (503, 0)
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
        self.now, self._timers, self._soon = 0.0, [], []

    def time(self):
        return self.now

    def call_later(self, seconds, call, *arguments):
        timer = FakeTimer(self.now + seconds, partial(call, *arguments))
        self._timers.append(timer)
        return timer

    def call_soon(self, call, *arguments):
        self._soon.append((call, arguments))

    def create_task(self, coroutine, **_):
        coroutine.close()
        return self

    def add_done_callback(self, _):
        pass

    def turn(self):
        """Run one turn of the loop."""
        soon, self._soon = self._soon, []
        for call, arguments in soon:
            call(*arguments)

    def wait(self, seconds):
        end = self.now + seconds
        while due := [each for each in self._timers if each.at <= end and not each.is_done]:
            timer = min(due, key=lambda each: each.at)
            self.now, timer.is_done = timer.at, True
            timer.call()
        self.now = end


class FakeTimer:
    def __init__(self, at, call):
        self.at, self.call, self.is_done = at, call, False

    def cancel(self):
        self.is_done = True


class FakeTransport:
    """Stands in for the socket of a connection."""

    def __init__(self, host):
        self._host = host
        self.is_aborted = self.is_closed = self.has_eof = False
        self.written = b""

    def get_extra_info(self, name):
        return (self._host, 1) if name == "peername" else None

    def write(self, data):
        self.written += data

    def abort(self):
        self.is_aborted = True

    def close(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_aborted or self.is_closed

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.has_eof = True

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


async def answers_nothing(scope, receive, send):
    """Stand in for an application; tests start none of its tasks."""


class Clients:
    """Opens connections of one server."""

    def __init__(self, max_connections=10, max_per_address=None):
        self.timers, self._state = FakeTimers(), ServerState()
        self._config = Config(app=answers_nothing, log_config=None)
        self._all = Connections(max_connections, max_per_address or max_connections)

    def connect(self, host="10.0.0.1"):
        connection = LimitedConnection(
            self._all,
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=self.timers,
        )
        connection.connection_made(FakeTransport(host))
        connection.transport = connection.transport._transport
        return connection

    def send(self, connection, data):
        connection.data_received(data)
        self.timers.turn()

    def busy(self, **options):
        """Return a connection whose request is complete."""
        connection = self.connect(**options)
        self.send(connection, HEAD + b"12345")
        return connection

    def reading(self, body=b"", **options):
        """Return a connection that has sent a part of its body."""
        connection = self.connect(**options)
        self.send(connection, HEAD + body)
        return connection

    def answer(self, connection):
        """Complete the answer to the request of a connection."""
        connection.cycle.response_complete = True
        connection.on_response_complete()


HEAD = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST", HEAD[:-4]], ids=["silent", "line", "almost"])
def test_a_head_that_does_not_end_is_closed(sent):
    clients = Clients()
    connection = clients.connect()
    if sent:
        clients.send(connection, sent)

    clients.timers.wait(HEAD_SECONDS - 1)
    assert not connection.transport.is_aborted
    if sent:
        # each byte starts no new wait
        clients.send(connection, b" ")
    clients.timers.wait(1)
    assert connection.transport.is_aborted


def test_a_request_with_a_whole_head_is_not_closed_here():
    clients = Clients()
    connection = clients.reading()

    clients.timers.wait(100 * HEAD_SECONDS)

    assert not connection.transport.is_aborted


def test_the_head_of_a_next_request_has_its_time_too():
    clients = Clients()
    connection = clients.busy()
    clients.answer(connection)
    clients.timers.wait(HEAD_SECONDS)
    assert not connection.transport.is_aborted

    clients.send(connection, b"PO")
    clients.timers.wait(HEAD_SECONDS)

    assert connection.transport.is_aborted


def test_a_request_that_came_during_the_answer_before_it_is_not_idle():
    clients = Clients()
    connection = clients.busy()
    clients.send(connection, HEAD + b"12345")

    clients.answer(connection)
    clients.timers.turn()
    clients.timers.wait(1000.0)

    assert connection.cycle.scope["path"] == "/embed"
    assert not connection.cycle.response_complete
    assert not connection.transport.is_closing()


def test_a_client_that_takes_nothing_of_its_answer_is_closed():
    clients = Clients()
    connection = clients.busy()
    connection.pause_writing()
    clients.timers.wait(READ_SECONDS - 1)
    connection.resume_writing()
    clients.timers.wait(READ_SECONDS)
    assert not connection.transport.is_aborted

    connection.pause_writing()
    clients.timers.wait(READ_SECONDS)

    assert connection.transport.is_aborted


@pytest.mark.parametrize("head", [b"Connection: close\r\n", b"Content-Length: 5\r\n"])
def test_a_client_that_does_not_take_its_last_answer_is_closed(head):
    clients = Clients()
    connection = clients.connect()
    clients.send(connection, b"POST /embed HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n")
    # of the second one, the rest of the body is dropped first
    connection.end()
    clients.timers.wait(DROP_STEP_SECONDS)
    assert connection.transport.is_closed
    assert not connection.transport.is_aborted

    clients.timers.wait(READ_SECONDS)

    assert connection.transport.is_aborted


def test_a_client_that_does_not_take_its_last_answer_makes_room():
    clients = Clients(max_connections=1)
    connection = clients.connect()
    clients.send(connection, b"GET /embed HTTP/1.1\r\nHost: a\r\n\r\n")
    connection.end()

    other = clients.connect()

    assert connection.transport.is_aborted
    assert not other.is_extra


@pytest.mark.parametrize(
    "bytes_each_step, seconds",
    [(0, DROP_STEP_SECONDS), (1000, DROP_STEP_SECONDS), (1 << 20, DROP_SECONDS)],
    ids=["silent", "slow", "fast"],
)
def test_the_rest_of_a_refused_request_is_dropped_while_it_comes_fast(bytes_each_step, seconds):
    clients = Clients()
    connection = clients.connect()
    clients.send(connection, b"no HTTP\r\n\r\n")
    # the answer and its end are there at once
    assert connection.transport.written.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert connection.transport.has_eof

    while not connection.transport.is_closed:
        clients.send(connection, bytes(bytes_each_step))
        clients.timers.wait(DROP_STEP_SECONDS)

    assert clients.timers.now == seconds


def open_ones(connections):
    return [not each.transport.is_aborted for each in connections]


def test_above_the_most_connections_the_one_that_is_idle_longest_is_closed():
    clients = Clients(max_connections=3)
    busy, silent, used = clients.busy(), clients.connect(), clients.busy()
    clients.answer(used)

    connections = [busy, silent, used, clients.connect()]
    assert open_ones(connections) == [True, False, True, True]
    silent.connection_lost(OSError())

    connections.append(clients.connect())
    assert open_ones(connections) == [True, False, False, True, True]


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the time of the clock."""
    now = [0.0]
    monkeypatch.setattr(connections_module.time, "monotonic", lambda: now[0])
    return now


def test_the_slowest_body_is_closed_before_others_and_before_idle_connections(clock):
    clients = Clients(max_connections=4)
    fast, slow = clients.reading(), clients.reading(b"1")
    fast.body_bytes = 1 << 20
    idle, busy = clients.connect(), clients.busy()
    clock[0] = 5.0

    connections = [fast, slow, idle, busy, clients.connect()]
    assert open_ones(connections) == [True, False, True, True, True]

    connections.append(clients.connect())
    assert open_ones(connections) == [True, False, False, True, True, True]


def test_a_body_that_has_just_begun_is_not_slow(clock):
    clients = Clients(max_connections=2)
    begun, idle = clients.reading(), clients.connect()

    assert open_ones([begun, idle, clients.connect()]) == [True, False, True]


def test_a_connection_that_drops_a_refused_body_is_closed_first(clock):
    clients = Clients(max_connections=3)
    idle, slow, refused = clients.connect(), clients.reading(), clients.connect()
    clock[0] = 5.0
    clients.send(refused, b"no HTTP\r\n\r\n")

    assert open_ones([idle, slow, refused, clients.connect()]) == [True, True, False, True]


def test_a_client_that_reads_no_answer_is_closed_for_a_new_one():
    clients = Clients(max_connections=2)
    stuck, busy = clients.busy(), clients.busy()
    stuck.pause_writing()

    assert open_ones([stuck, busy, clients.connect()]) == [False, True, True]


def test_an_address_has_a_part_of_the_connections():
    clients = Clients(max_connections=10, max_per_address=2)
    others = [clients.connect("10.0.0.2"), clients.connect("2001:db8::1")]
    # one network of 64 bits
    attackers = [clients.connect(f"2001:db8:0:1::{host}") for host in range(4)]

    assert open_ones(others) == [True, True]
    assert open_ones(attackers) == [False, False, True, True]


def test_while_all_connections_run_only_health_is_answered():
    clients = Clients(max_connections=2)
    busy = [clients.busy() for _ in range(2)]

    probe, other = clients.connect(), clients.connect()
    clients.send(probe, HEALTH)
    clients.send(other, HEAD)

    assert open_ones([*busy, probe, other]) == [True] * 4
    assert probe.cycle.scope["path"] == "/health"
    assert other.transport.written.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"the gateway has its most connections" in other.transport.written
    # their number is bounded too
    more = [clients.connect() for _ in range(HEALTH_CONNECTIONS)]
    assert open_ones([probe, *busy]) == [False, True, True]
    assert all(open_ones(more))

    busy[0].connection_lost(OSError())
    last = clients.busy()
    assert last.transport.written == b""


class SlowParsing(Connection):
    """A connection with endless bytes, whose pieces take a time."""

    has_more = True

    def __init__(self, clock, seconds):
        self._clock, self._seconds, self.pieces = clock, seconds, 0

    def close_now(self):
        pass

    def read_more(self):
        self.pieces += 1

    def parse_piece(self):
        self.pieces += 1
        self._clock[0] += self._seconds
        return self.has_more


def test_parsing_takes_a_few_milliseconds_of_each_turn_and_connections_take_turns(monkeypatch):
    clock, timers, connections = [0.0], FakeTimers(), Connections(10, 10)
    monkeypatch.setattr(connections_module.time, "perf_counter", lambda: clock[0])
    parsing = [SlowParsing(clock, 0.001) for _ in range(10)]
    for each in parsing:
        connections.add(each)
        connections.parse(each, timers)

    for turn in range(1, 5):
        timers.turn()
        assert clock[0] == pytest.approx(0.005 * turn)
    assert [each.pieces for each in parsing] == [2] * 10

    # nor is a new one parsed at once
    new = SlowParsing(clock, 0.001)
    connections.parse(new, timers, at_once=True)
    assert new.pieces == 0


def test_a_piece_of_a_connection_is_parsed_at_once_while_its_turn_has_time(monkeypatch):
    clock, timers, connections = [0.0], FakeTimers(), Connections(10)
    monkeypatch.setattr(connections_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(SlowParsing, "has_more", False)
    parsing = [SlowParsing(clock, 0.001) for _ in range(7)]

    for each in parsing:
        connections.parse(each, timers, at_once=True)
    assert [each.pieces for each in parsing] == [1] * 5 + [0] * 2

    timers.turn()
    assert [each.pieces for each in parsing] == [1] * 7


def test_refused_bodies_are_dropped_some_at_a_time():
    timers, connections = FakeTimers(), Connections(100, 100)
    dropping = [SlowParsing([0.0], 0.0) for _ in range(20)]
    for each in dropping:
        connections.drop_later(each, timers)

    read = []
    for _ in range(3):
        timers.wait(connections_module._DROP_PAUSE_SECONDS)
        read.append(sum(each.pieces for each in dropping))

    assert read == [8, 16, 20]


def test_health_is_read_before_other_connections_get_their_turn():
    clients = Clients()
    other, probe = clients.connect(), clients.connect()
    clients._all.parse(SlowParsing([0.0], 0.001), clients.timers)
    other.data_received(HEAD)

    probe.data_received(HEALTH)

    assert other.cycle is None
    assert probe.cycle.scope["path"] == "/health"


def test_a_connection_that_is_lost_has_no_timers():
    clients = Clients()
    connection = clients.busy()
    connection.pause_writing()
    connection.connection_lost(OSError())

    clients.timers.wait(10 * READ_SECONDS)

    assert not connection.transport.is_aborted


def test_an_idle_connection_that_is_lost_has_no_timers():
    clients = Clients()
    connection = clients.busy()
    clients.answer(connection)
    connection.connection_lost(OSError())

    clients.timers.wait(10 * READ_SECONDS)

    assert not connection.transport.is_closed
