"""Replies to the server's clients: the only file that knows response senders.

A request gets exactly one final response. One lock and one flag per request guard its sender:
asking a sender whether it is cancelled after its final response ends the server's process.
A failed send cannot be retried, so free shared memory is checked before a large one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np
import triton_python_backend_utils as pb_utils

from varlen import wire
from varlen.config import Task
from varlen.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    VarlenError,
)
from varlen.metrics import Outcome, Stats
from varlen.request import Float32Array, Output

_log = logging.getLogger(__name__)

_SENDER_THREADS = 2
# Responses of at least this size are sent only if two of them fit into shared memory.
_LARGE_BYTES = 1 << 20
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # only asked how much is free
# Outcome and error code by exception; the first match holds. Codes by name: while this file is
# imported, the server has not added its classes to pb_utils yet.
_OUTCOMES: tuple[tuple[type[Exception], Outcome, str], ...] = (
    (RequestError, "invalid", "INVALID_ARG"),
    (QueueFullError, "refused", "UNAVAILABLE"),
    (DeadlineError, "refused", "UNAVAILABLE"),
    (RequestCancelled, "cancelled", "CANCELLED"),
    (Exception, "failed", "INTERNAL"),
)


class ServerReply:
    """The reply to one request of the server."""

    def __init__(self, sender: pb_utils.ResponseSender, outbox: Outbox, stats: Stats) -> None:
        self._sender = sender
        self._outbox = outbox
        self._stats = stats
        self._arrival = time.monotonic()
        self._lock = Lock()
        self._answered = False
        # one response holds all rows
        self._outputs: dict[int, Float32Array] = {}

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._answered and self._sender.is_cancelled()

    def send(self, row: int, output: Output) -> None:
        assert isinstance(output, np.ndarray)
        self._outputs[row] = output

    def finish(self) -> None:
        outputs, self._outputs = self._outputs, {}
        self._outbox.put(self, [outputs[row] for row in range(len(outputs))])

    def fail(self, error: Exception) -> None:
        self._outbox.put(self, error)

    def deliver(self, response: pb_utils.InferenceResponse, outcome: Outcome) -> None:
        """Send the response unless one was sent. Blocks for a round trip."""
        with self._lock:
            if self._answered:
                return
            self._answered = True
            try:
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception:
                # the server closes a sender before it sends: a retry is impossible
                _log.exception("a response could not be sent")
                outcome = "failed"
        self._stats.count_request(outcome, time.monotonic() - self._arrival)


class Outbox:
    """Threads that build and send responses: neither the engine nor `execute` waits for the server."""

    def __init__(self, task: Task, stats: Stats) -> None:
        self._task = task
        self._stats = stats
        self._queue: SimpleQueue[tuple[ServerReply, Sequence[Float32Array] | Exception] | None] = (
            SimpleQueue()
        )
        self._threads = [
            Thread(target=self._loop, name=f"varlen-sender-{i}", daemon=True)
            for i in range(_SENDER_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def reply_to(self, request: pb_utils.InferenceRequest) -> ServerReply:
        """Return the reply to a request, which must be answered."""
        return ServerReply(request.get_response_sender(), self, self._stats)

    def put(self, reply: ServerReply, answer: Sequence[Float32Array] | Exception) -> None:
        """Enqueue an answer: one array per sequence, or an error."""
        self._queue.put((reply, answer))

    def close(self) -> None:
        """Send what is queued and stop the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while (entry := self._queue.get()) is not None:
            reply, answer = entry
            try:
                response, outcome = self._response(answer)
            except Exception as error:
                if not isinstance(error, VarlenError):
                    _log.exception("a response could not be built")
                    error = EngineError(
                        "the response could not be built; the server's log says why"
                    )
                response, outcome = _error_response(error)
            reply.deliver(response, outcome)
            # this frame must not keep an answer alive until the next one comes
            del entry, reply, answer, response

    def _response(
        self, answer: Sequence[Float32Array] | Exception
    ) -> tuple[pb_utils.InferenceResponse, Outcome]:
        if isinstance(answer, Exception):
            return _error_response(answer)
        array = wire.output_array(self._task, answer)
        check_shared_memory(array.nbytes)
        output = pb_utils.Tensor(wire.output_name(self._task), array)
        return pb_utils.InferenceResponse([output]), "ok"


def check_shared_memory(size: int) -> None:
    """Raise EngineError if a response of `size` bytes may not fit into shared memory."""
    if size < _LARGE_BYTES:
        return
    stat = os.statvfs(_SHARED_MEMORY)
    if stat.f_bavail * stat.f_frsize < 2 * size:
        raise EngineError(f"the server has too little shared memory for an answer of {size} bytes")


def _error_response(error: Exception) -> tuple[pb_utils.InferenceResponse, Outcome]:
    outcome, code = next(row[1:] for row in _OUTCOMES if isinstance(error, row[0]))
    server_error = pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=server_error), outcome
