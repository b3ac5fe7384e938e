"""The process that sends prepared requests over plain sockets, with HTTP/1.1 or gRPC.

A gRPC client in Python needs as much of a core as a gateway does, and an HTTP client needs less. Here both protocols
have the same loop: bytes that were made before leave in one send, and an answer is read up to its end, but not parsed.

Source: RFC 9113 (HTTP/2), RFC 7541 (its header fields), and gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import gc
import json
import re
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from tritonclient.grpc import InferResult, service_pb2

from varlen_bench.harness.generator import LoadRecord, Outcome, RequestRecord
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.workers.serving import OUTPUT, Load, load_row
from varlen_tools.local_server import LOOPBACK

# The tensors that the gateway sends and asks for.
TEXT, COUNT = "text", "num_tokens"
_PATIENCE_SECONDS = 60.0
_RECEIVED_BYTES = 1 << 16
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


class Connection(Protocol):
    """A connection that has one request in flight."""

    socket: socket.socket

    def send(self, body: bytes) -> None:
        """Send a request."""
        ...

    def receive(self) -> tuple[Outcome, bytes] | None:
        """Read what has come; at the end of an answer return its outcome and content."""
        ...


def _connected(port: int) -> socket.socket:
    found = socket.create_connection((LOOPBACK, port), timeout=_PATIENCE_SECONDS)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _read(connection: socket.socket) -> bytes:
    if data := connection.recv(_RECEIVED_BYTES):
        return data
    raise ConnectionError("the server has closed a connection")


class HttpConnection:
    """A connection with HTTP/1.1 for JSON bodies."""

    def __init__(self, port: int, path: str) -> None:
        self.socket = _connected(port)
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\nAccept: application/json\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._received = bytearray()

    def send(self, body: bytes) -> None:
        """Send a request."""
        self.socket.sendall(self._head + b"%d\r\n\r\n%b" % (len(body), body))

    def receive(self) -> tuple[Outcome, bytes] | None:
        """Read what has come; at the end of an answer return its outcome and content."""
        self._received += _read(self.socket)
        head, end, content = bytes(self._received).partition(b"\r\n\r\n")
        if not end:
            return None
        found = _LENGTH.search(head)
        if found is None:
            raise ConnectionError(f"an answer has no length: {head!r}")
        if len(content) < int(found[1]):
            return None
        self._received.clear()
        status = head.split(b" ", 2)[1]
        outcome: Outcome = "refused" if status in (b"429", b"503") else "failed"
        return "ok" if status == b"200" else outcome, content


# Types of frames of HTTP/2, and flags.
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_FRAME_HEAD = 9
# Setting 4 is the window of a stream, in bytes.
_STREAM_WINDOW, _WINDOW_BYTES = 4, 1 << 24


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def _string(text: str) -> bytes:
    """Return a string of header fields: its length, and its bytes."""
    assert len(text) < 127, "a longer length has two bytes"
    return bytes([len(text)]) + text.encode()


def _header_fields(port: int, path: str) -> bytes:
    """Return the header fields of a call; names that RFC 7541 lists are numbers."""
    return b"".join(
        [
            # POST, http
            b"\x83\x86",
            b"\x04" + _string(path),
            b"\x01" + _string(f"{LOOPBACK}:{port}"),
            # number 31 has two bytes
            b"\x0f\x10" + _string("application/grpc"),
            b"\x00" + _string("te") + _string("trailers"),
        ]
    )


class GrpcConnection:
    """A connection with HTTP/2 for calls of one method, one after another."""

    def __init__(self, port: int, path: str) -> None:
        self.socket = _connected(port)
        self._fields = _header_fields(port, path)
        self._received, self._content = bytearray(), bytearray()
        # bytes of answers that the server may send again
        self._read_bytes = _WINDOW_BYTES
        self._stream = -1
        settings = struct.pack(">HI", _STREAM_WINDOW, _WINDOW_BYTES)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))

    def send(self, body: bytes) -> None:
        """Send a call; `body` is its message."""
        self._stream += 2
        window, self._read_bytes = struct.pack(">I", self._read_bytes), 0
        message = struct.pack(">BI", 0, len(body)) + body
        self.socket.sendall(
            (_frame(_WINDOW, 0, 0, window) if any(window) else b"")
            + _frame(_HEADERS, _END_HEADERS, self._stream, self._fields)
            + _frame(_DATA, _END_STREAM, self._stream, message)
        )

    def receive(self) -> tuple[Outcome, bytes] | None:
        """Read what has come; at the end of an answer return its outcome and message.

        A call that fails has no message.
        """
        self._received += _read(self.socket)
        is_last = False
        while len(self._received) >= _FRAME_HEAD:
            size = int.from_bytes(self._received[:3], "big")
            end = _FRAME_HEAD + size
            if len(self._received) < end:
                break
            kind, flags = self._received[3], self._received[4]
            content = bytes(self._received[_FRAME_HEAD:end])
            del self._received[:end]
            is_last |= self._take(kind, flags, content)
        if not is_last:
            return None
        message = bytes(self._content[5:])
        self._content.clear()
        return "ok" if message else "failed", message

    def _take(self, kind: int, flags: int, content: bytes) -> bool:
        """Take a frame; return whether it ends an answer."""
        if kind == _DATA:
            self._content += content
            self._read_bytes += len(content)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            answer = content if kind == _PING else b""
            self.socket.sendall(_frame(kind, _ACK, 0, answer))
        elif kind in (_RESET, _GOAWAY):
            raise ConnectionError(f"the server has ended a call: frame {kind}, {content!r}")
        return kind in (_DATA, _HEADERS) and bool(flags & _END_STREAM)


def keep_in_flight(
    connections: Sequence[Connection], bodies: Sequence[bytes], seconds: float
) -> LoadRecord:
    """Send requests for some seconds, one at a time on each connection."""
    record, running = LoadRecord(end=seconds), dict[int, RequestRecord]()
    began = time.perf_counter()

    def send(connection: Connection) -> None:
        number, now = len(record.requests), time.perf_counter() - began
        request = RequestRecord(number, now, now)
        record.requests.append(request)
        running[id(connection)] = request
        connection.send(bodies[number % len(bodies)])

    with selectors.DefaultSelector() as selector:
        for each in connections:
            selector.register(each.socket, selectors.EVENT_READ, each)
            send(each)
        while running and (ready := selector.select(_PATIENCE_SECONDS)):
            for key, _ in ready:
                connection: Connection = key.data
                if (answer := connection.receive()) is None:
                    continue
                request, now = running.pop(id(connection)), time.perf_counter() - began
                request.done, (request.outcome, content) = now, answer
                if request.outcome != "ok" and not record.reasons:
                    record.reasons.append(content.decode(errors="replace")[:200])
                if now < seconds:
                    send(connection)
    return record


def grpc_body(model: str, text: str) -> bytes:
    """Return the message of a call for one text."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name=TEXT, datatype="BYTES", shape=[1, 1])
    content = text.encode()
    message.raw_input_contents.append(len(content).to_bytes(4, "little") + content)
    for name in (OUTPUT, COUNT):
        message.outputs.add(name=name)
    return bytes(message.SerializeToString())


def http_body(model: str, text: str) -> bytes:
    """Return the body of `/v1/embeddings` for one text."""
    return json.dumps({"model": model, "input": text, "encoding_format": "float"}).encode()


def vector_of(protocol: str, content: bytes) -> list[float]:
    """Return the vector of an answer."""
    if protocol == "http":
        return [float(value) for value in json.loads(content)["data"][0]["embedding"]]
    found = InferResult(service_pb2.ModelInferResponse.FromString(content)).as_numpy(OUTPUT)
    return [float(value) for value in np.asarray(found)[0]]


_PROTOCOLS: dict[str, tuple[Callable[[int, str], Connection], Callable[[str, str], bytes]]] = {
    "http": (HttpConnection, http_body),
    "grpc": (GrpcConnection, grpc_body),
}


def start(argument: Message) -> Callable[[Message], Message]:
    """Return the function that answers orders for a route.

    An order has a `load`, or asks for the vectors of all texts.
    """
    texts: list[str] = argument["texts"]

    def handle(order: Message) -> Message:
        route: dict[str, Any] = order["route"]
        connect, write = _PROTOCOLS[route["protocol"]]
        bodies = [write(route["model"], text) for text in texts]
        load = None if order.get("load") is None else Load.from_json(order["load"])
        count = 1 if load is None else load.max_waiting
        connections = [connect(route["port"], route["path"]) for _ in range(count)]
        try:
            if load is None:
                return _vectors(route["protocol"], connections[0], bodies)
            gc.collect()
            gc.disable()
            busy = time.process_time()
            record = keep_in_flight(connections, bodies, load.end)
            busy = time.process_time() - busy
            gc.enable()
            return {"row": asdict(load_row(load, route["system"], record)), "seconds": busy}
        finally:
            for each in connections:
                each.socket.close()

    return handle


def _vectors(protocol: str, connection: Connection, bodies: Sequence[bytes]) -> Message:
    vectors = []
    for body in bodies:
        connection.send(body)
        while (answer := connection.receive()) is None:
            pass
        outcome, content = answer
        if outcome != "ok":
            return {"error": content.decode(errors="replace") or "the call has failed"}
        vectors.append(vector_of(protocol, content))
    return {"vectors": vectors}


if __name__ == "__main__":
    run_worker(start)
