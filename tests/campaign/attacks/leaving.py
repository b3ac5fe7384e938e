"""Clients that go away: their requests end on the server, and disturb no other one.

Few cancel at once: the gRPC front end of server 2.51 has races there, which later versions do not have.
"""

import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from threading import BoundedSemaphore
from typing import Any, cast

import grpc
import numpy as np

from tests.server.clients import AnswerError, Tensor, http_request, integers
from varlen_client import GeneratedPart, RequestTimeout
from varlen_tools.local_server import LOOPBACK

from ..endings import TIMEOUT_SECONDS, Ending
from ..known import GREEDY
from ..models import DECODER, ENCODER, HIDDEN, TRANSLATOR
from ..target import MINILM_LONGEST, PROTOCOLS, Target

_MOST_CANCELLATIONS = BoundedSemaphore(2)
_LONG_ANSWER = 120


def grpc_deadline(draw: random.Random, target: Target) -> Ending:
    """A gRPC deadline that passes before, while or after the request runs."""
    inputs, rows = _work(draw)
    seconds = draw.choice((0.001, 0.005, 0.02, 0.05, 0.2))
    with _MOST_CANCELLATIONS:
        try:
            answer = target.grpc.infer(ENCODER, inputs, timeout=seconds)
        except AnswerError as error:
            return _left(error, ENCODER, rows)
    return _checked(answer, rows)


def http_timeout(draw: random.Random, target: Target) -> Ending:
    """An HTTP client that waits too short a time."""
    inputs, rows = _work(draw)
    try:
        answer = target.http.infer(ENCODER, inputs, timeout=draw.choice((0.001, 0.01, 0.05)))
    except AnswerError as error:
        return _left(error, ENCODER, rows)
    return _checked(answer, rows)


def grpc_cancel(draw: random.Random, target: Target) -> Ending:
    """A gRPC request that its client cancels."""
    inputs, rows = _work(draw)
    with _MOST_CANCELLATIONS:
        call = target.grpc.call(ENCODER, inputs, TIMEOUT_SECONDS)
        time.sleep(draw.choice((0.0, 0.001, 0.01, 0.05)))
        was_cancelled = call.cancel()
        try:
            call.result()
        except grpc.FutureCancelledError:
            return Ending("left", ENCODER, "CANCELLED", rows=rows)
        except grpc.RpcError as error:
            return _left(AnswerError(error.code().name, error.details()), ENCODER, rows)
    assert not was_cancelled
    return Ending("answered", ENCODER, rows=rows)


def grpc_channel_close(draw: random.Random, target: Target) -> Ending:
    """A gRPC connection that breaks under a request."""
    inputs, rows = _work(draw)
    with _MOST_CANCELLATIONS, type(target.grpc)(target.server) as client:
        call = client.call(ENCODER, inputs, TIMEOUT_SECONDS)
        time.sleep(draw.choice((0.0, 0.005, 0.03)))
    return Ending("answered" if call.code() is grpc.StatusCode.OK else "left", ENCODER, rows=rows)


def http_disconnect(draw: random.Random, target: Target) -> Ending:
    """An HTTP connection that ends in the middle of a request, or before its answer."""
    inputs, rows = _work(draw)
    path, body, headers = http_request(ENCODER, inputs, {})
    sent = draw.choice((0, 1, len(body) // 2, len(body) - 1, len(body), len(body)))
    _hang_up(draw, target, path, body[:sent], {**headers, "Content-Length": str(len(body))})
    # the server gives up what it did not read, and tells no model
    return Ending("left", ENCODER if sent == len(body) else "", rows=rows)


def stream_abandon(draw: random.Random, target: Target) -> Ending:
    """A stream whose client stops reading after some parts."""
    client = target.client(DECODER, draw.choice(PROTOCOLS))
    wanted = draw.randint(0, 5)
    prompt = draw.choice(list(target.known.continuations))
    parts = client.stream(prompt, max_tokens=_LONG_ANSWER, timeout=TIMEOUT_SECONDS, **GREEDY)
    with _MOST_CANCELLATIONS, closing(cast("Generator[GeneratedPart, None, None]", parts)):
        try:
            for _ in range(wanted):
                next(parts)
        except RequestTimeout as error:
            return Ending("lost", DECODER, message=str(error))
    return Ending("left", DECODER) if wanted else Ending("left")


def stream_disconnect(draw: random.Random, target: Target) -> Ending:
    """An HTTP stream whose connection is reset."""
    model = draw.choice((DECODER, TRANSLATOR))
    body = {"text_input": "def", "stream": True, "max_tokens": _LONG_ANSWER, "ignore_eos": True}
    path = f"/v2/models/{model}/generate_stream"
    data = json.dumps(body).encode()
    _hang_up(draw, target, path, data, {"Content-Length": str(len(data))})
    return Ending("left", model)


def half_a_second_of_silence(draw: random.Random, target: Target) -> Ending:
    """A connection that sends part of a head, waits, and closes."""
    with socket.create_connection((LOOPBACK, target.server.http_port)) as connection:
        connection.sendall(
            b"POST /v2/models/minilm/infer HTTP/1.1\r\nContent-Le"[: draw.randint(1, 48)]
        )
        time.sleep(draw.uniform(0, 0.5))
    return Ending("left")


def large_hidden_disconnect(draw: random.Random, target: Target) -> Ending:
    """An HTTP client that does not read a large answer to its end."""
    rows = draw.randint(8, 32)
    path, body, headers = http_request(HIDDEN, {"input_ids": integers(np.full((rows, 300), 7))}, {})
    connection = http.client.HTTPConnection(
        LOOPBACK, target.server.http_port, timeout=TIMEOUT_SECONDS
    )
    try:
        connection.request("POST", path, body, headers)
        connection.getresponse().read(draw.choice((0, 1, 1000)))
    except TimeoutError:
        return Ending("lost", HIDDEN, message="no answer", rows=rows)
    finally:
        connection.close()
    return Ending("answered", HIDDEN, rows=rows)


def _work(draw: random.Random) -> tuple[Mapping[str, Tensor], int]:
    """Return inputs of `minilm`, milliseconds to tenths of a second of work, and their rows.

    Most are small: what a client leaves behind runs all the same, and takes the time of other requests.
    """
    [rows] = draw.choices((1, 4, 16), (15, 4, 1))
    length = draw.randint(1, draw.choice((24, MINILM_LONGEST)))
    return {"input_ids": integers(np.full((rows, length), 2000 + length))}, rows


def _hang_up(
    draw: random.Random, target: Target, path: str, body: bytes, headers: Mapping[str, Any]
) -> None:
    """Send a request, and close its connection soon, sometimes with a reset."""
    head = [f"POST {path} HTTP/1.1", f"Host: {LOOPBACK}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection((LOOPBACK, target.server.http_port)) as connection:
        if draw.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        time.sleep(draw.choice((0.0, 0.002, 0.05)))


def _left(error: AnswerError, model: str, rows: int) -> Ending:
    if error.code in ("DEADLINE_EXCEEDED", "CANCELLED"):
        return Ending("left", model, error.code, rows=rows)
    return Ending("wrong", model, error.code, error.message, rows)


def _checked(answer: Any, rows: int) -> Ending:
    is_finite = len(answer) == rows and bool(np.isfinite(answer).all())
    return Ending("answered" if is_finite else "wrong", ENCODER, rows=rows)
