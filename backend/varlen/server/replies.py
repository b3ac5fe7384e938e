"""Replies to the server's clients: the only file that knows response senders.

A request gets exactly one final response; a generated answer may send parts before it.
One lock and one flag per request guard its sender: asking a sender whether it is cancelled after its
final response ends the server's process. A failed send cannot be retried, so there must be shared memory for it
(`shared_memory`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from varlen.errors import (
    DeadlineError,
    DrainingError,
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    VarlenError,
)
from varlen.request.request import GeneratedPart, Output
from varlen.server.kinds import Answer
from varlen.server.shared_memory import check_answer, sending
from varlen.telemetry.metrics import CountedMetric, Outcome, Stats
from varlen.telemetry.tracing import RequestTrace, RequestTracer

_log = logging.getLogger(__name__)

_SENDER_THREADS = 2
# Longest time between two questions whether the client of a running request is still there.
_CANCEL_CHECK_SECONDS = 0.02
# Outcome and error code by exception; the first match holds. Codes by name: while this file is
# imported, the server has not added its classes to pb_utils yet.
_OUTCOMES: tuple[tuple[type[Exception], Outcome, str], ...] = (
    (RequestError, "invalid", "INVALID_ARG"),
    (QueueFullError, "refused", "UNAVAILABLE"),
    (DeadlineError, "refused", "UNAVAILABLE"),
    (DrainingError, "refused", "UNAVAILABLE"),
    (RequestCancelled, "cancelled", "CANCELLED"),
    (Exception, "failed", "INTERNAL"),
)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error as its client gets it.

    A reply keeps no exception: the frames of its tracebacks, and of the errors behind it, would keep the request and
    the reply, so only the garbage collector could free the tensors.
    """

    outcome: Outcome
    code: str
    message: str

    @staticmethod
    def of(error: Exception) -> _Failure:
        outcome, code = next(row[1:] for row in _OUTCOMES if isinstance(error, row[0]))
        # a message may repeat half a surrogate pair out of a client's JSON, which has no UTF-8
        return _Failure(outcome, code, str(error).encode(errors="replace").decode())


_End: TypeAlias = Literal["finished"] | _Failure


class ServerReply:
    """The reply to one request of the server.

    The engine adds outputs. A sender thread takes a turn when there is something to send, one thread at a time, so
    responses keep their order. Outputs that come during a turn share the next response, so a slow client never has more
    than one response under way.

    Attributes:
        arrival: time at which the request came, in seconds of `time.monotonic`.
        trace: gets the times of the request; None if it is not traced.
    """

    def __init__(
        self,
        sender: pb_utils.ResponseSender,
        outbox: Outbox,
        stats: Stats,
        *,
        names_codes: bool = False,
        is_warmup: bool = False,
    ) -> None:
        self._sender = sender
        self._outbox = outbox
        self._stats = stats
        self._names_codes = names_codes
        self._is_warmup = is_warmup
        self.arrival = time.monotonic()
        self._answer: Answer | None = None
        self._streams = False
        self._times: dict[int, _TokenTimes] = {}
        # guards what is to be sent; held for no call of the server
        self._lock = Lock()
        self._outputs: list[tuple[int, Output]] = []
        self._end: _End | None = None
        self._in_turn = False
        # guards the sender, which must not be asked anything after its final response
        self._sender_lock = Lock()
        self._answered = False
        self._accepted = False
        self._cancelled = False
        self._last_check = self.arrival
        self._tracer: RequestTracer | None = None
        self.trace: RequestTrace | None = None

    def accept(self) -> None:
        """Count the request as open until it is answered; before anything can answer it."""
        self._accepted = True
        self._outbox.count_open(1)

    def begin_trace(self, tracer: RequestTracer, context: str | None) -> None:
        """Trace the request if the context of the server says so."""
        self._tracer = tracer
        self.trace = tracer.begin(context, self.arrival)

    def expect(self, answer: Answer) -> None:
        """Set what makes the responses, before the request runs.

        Raises:
            RequestError, QueueFullError: there is too little shared memory for the answer.
        """
        try:
            check_answer(answer.num_bytes)
        except QueueFullError:
            self._stats.count_refusal("shared_memory")
            raise
        self._answer, self._streams = answer, answer.streams

    def is_cancelled(self) -> bool:
        """Return whether the client has gone away, or can no longer be answered.

        The server is not asked for a new request. Once parts of the answer come, the sender threads ask it, so the
        engine does not.
        """
        if not self._times and time.monotonic() - self._last_check > _CANCEL_CHECK_SECONDS:
            self._check_cancellation()
        return self._cancelled

    def send(self, row: int, output: Output) -> None:
        with self._lock:
            self._outputs.append((row, output))
            wants_turn = self._num_ready() > 0
        if isinstance(output, GeneratedPart):
            now = time.monotonic()
            self._measure(row, output, now)
            if wants_turn or now - self._last_check > _CANCEL_CHECK_SECONDS:
                self._request_turn()

    def finish(self) -> None:
        self._finish("finished")

    def fail(self, error: Exception) -> None:
        self._finish(_Failure.of(error))

    def send_ready(self) -> None:
        """Send what is ready, and ask whether the client is still there. Never raises."""
        try:
            self._advance()
        # also a panic of the tokenizers library, which is no Exception and would end the thread
        except BaseException as error:
            if not isinstance(error, VarlenError):
                _log.exception("a response could not be built or sent")
                error = EngineError("the response could not be sent; the server's log says why")
            # ends the generation
            self._cancelled = True
            self._send_error(_Failure.of(error))
        with self._lock:
            if self._answered:
                self._outputs.clear()
            self._in_turn = not self._answered and (self._end is not None or self._num_ready() > 0)
            if not self._in_turn:
                return
        self._outbox.put(self)

    def _finish(self, end: _End) -> None:
        if self.trace:
            self.trace.finish()
        with self._lock:
            self._end = end
        self._request_turn()

    def _request_turn(self) -> None:
        with self._lock:
            if self._in_turn:
                return
            self._in_turn = True
        self._outbox.put(self)

    def _num_ready(self) -> int:
        """Return the number of outputs to send now. The lock is held."""
        if self._end:
            return len(self._outputs)
        if not self._outputs or not self._streams:
            return 0
        _, last = self._outputs[-1]
        # the last part of an answer leaves in the final response
        is_end_of_row = isinstance(last, GeneratedPart) and last.finish_reason is not None
        return len(self._outputs) - is_end_of_row

    def _advance(self) -> None:
        with self._lock:
            end, ready = self._end, self._num_ready()
            outputs = self._outputs[:ready]
            del self._outputs[:ready]
        if isinstance(end, _Failure):
            self._send_error(end)
        elif end:
            self._send_outputs(outputs, is_final=True)
        else:
            if outputs and not self._cancelled:
                self._send_outputs(outputs, is_final=False)
            self._check_cancellation()

    def _send_outputs(self, outputs: Sequence[tuple[int, Output]], *, is_final: bool) -> None:
        assert self._answer is not None
        tensors = self._answer.tensors(outputs)
        with sending(sum(_num_bytes(array) for array in tensors.values())):
            # no variable holds the response, whose memory has to be free afterwards
            if is_final:
                self._send_final(_response(tensors), "ok")
            else:
                self._sender.send(_response(tensors))

    def _send_error(self, failure: _Failure) -> None:
        code, message = failure.code, failure.message
        if self._is_warmup and failure.outcome == "invalid":
            # an error would end the load: rows of zeros are texts without characters
            self._outbox.log_skipped(message)
            self._send_final(_response({}), failure.outcome, error=message)
            return
        if self._names_codes:
            message = f"{code}: {message}"
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        response = pb_utils.InferenceResponse(error=error)
        self._send_final(response, failure.outcome, error=message)

    def _send_final(
        self, response: pb_utils.InferenceResponse, outcome: Outcome, *, error: str | None = None
    ) -> None:
        """Send the final response unless one was sent. Blocks for a round trip."""
        with self._sender_lock:
            if self._answered:
                return
            self._answered = True
            if self._is_warmup:
                # before the server sends the next one
                self._outbox.last_warmup = time.monotonic()
            try:
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception:
                # the server closes a sender before it sends: a retry is impossible
                _log.exception("a response could not be sent")
                outcome = "failed"
        self._stats.count_request(outcome, time.monotonic() - self.arrival)
        if self._accepted:
            self._outbox.count_open(-1)
        self._end_trace(outcome, error)

    def _end_trace(self, outcome: Outcome, error: str | None) -> None:
        if self._tracer is None or self.trace is None:
            return
        try:
            self._tracer.end(self.trace, outcome, error)
        except Exception:
            _log.exception("the spans of a request could not be made")

    def _check_cancellation(self) -> None:
        with self._sender_lock:
            if not self._answered and not self._cancelled:
                self._last_check = time.monotonic()
                self._cancelled = self._sender.is_cancelled()

    def _measure(self, row: int, part: GeneratedPart, now: float) -> None:
        times = self._times.get(row)
        if times is None:
            self._times[row] = times = _TokenTimes(now)
            self._stats.observe(CountedMetric.TIME_TO_FIRST_TOKEN, now - self.arrival)
        times.tokens += len(part.token_ids)
        if part.finish_reason and times.tokens > 1:
            seconds = (now - times.first) / (times.tokens - 1)
            self._stats.observe(CountedMetric.TIME_PER_OUTPUT_TOKEN, seconds)


@dataclass(slots=True)
class _TokenTimes:
    first: float
    tokens: int = 0


class Outbox:
    """Threads that build and send responses: neither the engine nor `execute` waits for the server.

    With `names_codes`, the messages of errors begin with their code, for example "INVALID_ARG: ". A gRPC stream carries
    nothing else of an error.

    Attributes:
        last_warmup: time of the last answer to a row of `model_warmup`; before one, of the load.
    """

    def __init__(
        self, stats: Stats, *, names_codes: bool = False, tracer: RequestTracer | None = None
    ) -> None:
        self._stats = stats
        self._names_codes = names_codes
        self._tracer = tracer
        self._queue: SimpleQueue[ServerReply | None] = SimpleQueue()
        self._open = 0
        self.last_warmup = time.monotonic()
        self._has_skipped = False
        self._counting = Lock()
        self._threads = [
            Thread(target=self._loop, name=f"varlen-sender-{i}", daemon=True)
            for i in range(_SENDER_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def open_requests(self) -> int:
        with self._counting:
            return self._open

    def count_open(self, change: int) -> None:
        """Count a request as accepted, 1, or as answered, -1."""
        with self._counting:
            self._open += change

    def reply_to(
        self, request: pb_utils.InferenceRequest, *, is_warmup: bool = False
    ) -> ServerReply:
        """Return the reply to a request, which must be answered.

        An invalid request that the server made from `model_warmup` gets an empty response.
        """
        sender = request.get_response_sender()
        reply = ServerReply(
            sender, self, self._stats, names_codes=self._names_codes, is_warmup=is_warmup
        )
        if self._tracer is not None:
            try:
                reply.begin_trace(self._tracer, request.trace().get_context())
            except Exception as error:
                # without its sender, the request would never be answered
                _log.warning("requests are not traced, for which the extra `tracing` is: %r", error)
                self._tracer = None
        return reply

    def log_skipped(self, reason: str) -> None:
        """Log why a row of `model_warmup` did not run, once for all of them."""
        if not self._has_skipped:
            self._has_skipped = True
            _log.warning("rows of model_warmup that this model refuses are skipped: %s", reason)

    def put(self, reply: ServerReply) -> None:
        self._queue.put(reply)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        # replies that asked for another turn after the threads were told to stop
        while not self._queue.empty():
            if reply := self._queue.get():
                reply.send_ready()

    def _loop(self) -> None:
        while (reply := self._queue.get()) is not None:
            reply.send_ready()
            # this frame must not keep an answer alive until the next one comes
            del reply


def _response(tensors: Mapping[str, npt.NDArray[Any]]) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, array) for name, array in tensors.items()]
    )


def _num_bytes(array: npt.NDArray[Any]) -> int:
    """Return the size of an array in a response; strings come with their lengths."""
    return sum(4 + len(each) for each in array.flat) if array.dtype == np.object_ else array.nbytes
