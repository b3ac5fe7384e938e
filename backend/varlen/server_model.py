"""The entry that Triton Inference Server calls, and the only file that knows its response senders.

The server punishes some mistakes with a crash, a hung client or a model that never unloads; the
code here is shaped by them:

* `execute` never raises, and returns None at once: answers leave later from sender threads.
* Every request taken is answered once. One lock and one flag per request stand around its sender,
  because asking a sender whether it is cancelled after its answer ends the server's process.
* A failed send cannot be repeated, so free shared memory is checked before a large one.
* The module is imported twice per load, once only to complete the configuration: torch is imported inside `initialize`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence as AnySequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from varlen import wire
from varlen.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    VarlenError,
)
from varlen.metrics import Outcome, Stats
from varlen.models.checkpoint import Checkpoint
from varlen.request import Float32Array
from varlen.server_config import (
    check_server_settings,
    check_tensors,
    engine_config,
    gpu_of_instance,
    tensor_entry,
)
from varlen.server_process import (
    MemoryTrimmer,
    check_numpy,
    log_to_server,
    return_large_memory,
    start_exporter,
    start_watchdog,
)

if TYPE_CHECKING:
    from varlen.service import Service

_log = logging.getLogger(__name__)

_SENDER_THREADS = 2
# Answers from this size on are sent only if shared memory holds them twice over.
_LARGE_BYTES = 1 << 20
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # only asked how much is free
# Outcome and error code by what went wrong; the first that fits. Codes by name: while this file
# is imported, the server has not put its classes into pb_utils yet.
_OUTCOMES: tuple[tuple[type[Exception], Outcome, str], ...] = (
    (RequestError, "invalid", "INVALID_ARG"),
    (QueueFullError, "refused", "UNAVAILABLE"),
    (DeadlineError, "refused", "UNAVAILABLE"),
    (RequestCancelled, "cancelled", "CANCELLED"),
    (Exception, "failed", "INTERNAL"),
)


class TritonPythonModel:
    """One instance of a model on the server."""

    @staticmethod
    def auto_complete_config(
        auto_complete_model_config: pb_utils.ModelConfig,
    ) -> pb_utils.ModelConfig:
        """Return the configuration with the inputs, outputs and row limit that it leaves out."""
        config = auto_complete_model_config
        given = config.as_dict()
        try:
            checkpoint = Checkpoint.open(pb_utils.get_model_dir())
            task = engine_config(given).task or checkpoint.task
            checkpoint.check_task(task)
            outputs = wire.output_specs(task, checkpoint.hidden_size, checkpoint.num_labels)
        except VarlenError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        # what the user wrote stays; initialize checks it
        if not given["input"]:
            for spec in wire.input_specs(task):
                config.add_input(tensor_entry(spec) | {"optional": spec.optional})
        if not given["output"]:
            for spec in outputs:
                config.add_output(tensor_entry(spec))
        if not given["max_batch_size"]:
            config.set_max_batch_size(wire.DEFAULT_MAX_ROWS)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and start its threads.

        Raises:
            TritonModelException: the configuration or the checkpoint cannot be served; the message says why.
        """
        log_to_server()
        return_large_memory()
        model_config = json.loads(args["model_config"])
        self._stats = Stats()
        try:
            config = engine_config(model_config)
            log_to_server(config.log_level)
            check_server_settings(model_config)
            # before the engine's thread starts, which an error would leave behind
            checkpoint = Checkpoint.open(pb_utils.get_model_dir())
            task = config.task or checkpoint.task
            checkpoint.check_task(task)
            check_tensors(model_config, checkpoint, task)
            check_numpy()

            from varlen.service import Service

            self._service: Service = Service.load(
                checkpoint.folder, config, self._stats, gpu=gpu_of_instance(args)
            )
        except VarlenError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._exporter = start_exporter(args, self._stats, self._service.readings)
        self._outbox = _Outbox(self._service)
        self._trimmer = MemoryTrimmer()
        self._watchdog = start_watchdog()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Queue the requests, or answer at once why not. Never raises."""
        for request in requests:
            try:
                reply = _ServerReply(request.get_response_sender(), self._outbox, self._stats)
            except Exception:
                # without a sender there is nobody to answer
                _log.exception("a request came without a response sender")
                continue
            self._accept(request, reply)

    def is_ready(self) -> bool:
        """Return whether the engine runs."""
        return self._service.is_ready

    def finalize(self) -> None:
        """Stop the threads. The server calls this once every request has been answered."""
        self._service.close()
        self._outbox.close()
        if self._exporter is not None:
            self._exporter.close()
        self._trimmer.close()
        self._watchdog.kill()
        self._watchdog.wait()

    def _accept(self, request: pb_utils.InferenceRequest, reply: _ServerReply) -> None:
        try:
            checked = wire.read_request(
                {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                request.parameters(),
                self._service.intake,
                normalize=self._service.checkpoint.normalize,
                timeout_microseconds=request.timeout(),
            )
            self._service.submit(checked, reply)
        except VarlenError as error:
            reply.fail(error)
        except Exception:
            _log.exception("a request could not be read")
            reply.fail(EngineError("the request could not be read; the server's log says why"))


class _ServerReply:
    """One request's way back to its client."""

    def __init__(self, sender: pb_utils.ResponseSender, outbox: _Outbox, stats: Stats) -> None:
        self._sender = sender
        self._outbox = outbox
        self._stats = stats
        self._arrival = time.monotonic()
        self._lock = Lock()
        self._answered = False
        self._outputs: dict[int, Float32Array] = {}

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._answered and self._sender.is_cancelled()

    def send(self, row: int, output: Float32Array) -> None:
        self._outputs[row] = output

    def finish(self) -> None:
        self._outbox.put(self, [self._outputs[row] for row in range(len(self._outputs))])

    def fail(self, error: Exception) -> None:
        self._outbox.put(self, error)

    def respond(self, response: pb_utils.InferenceResponse, outcome: Outcome) -> None:
        """Answer the client, unless it has been answered. Blocks for a round trip to the server."""
        with self._lock:
            if self._answered:
                return
            self._answered = True
            try:
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception:
                # the server closes a sender before it sends: there is no second try
                _log.exception("an answer could not be sent")
                outcome = "failed"
        self._stats.count_request(outcome, time.monotonic() - self._arrival)


class _Outbox:
    """Threads that build and send answers, so that neither the engine nor `execute` waits for the server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._answers: SimpleQueue[
            tuple[_ServerReply, AnySequence[Float32Array] | Exception] | None
        ] = SimpleQueue()
        self._threads = [
            Thread(target=self._loop, name=f"varlen-sender-{i}", daemon=True)
            for i in range(_SENDER_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, reply: _ServerReply, answer: AnySequence[Float32Array] | Exception) -> None:
        self._answers.put((reply, answer))

    def close(self) -> None:
        """Send what is left and stop the threads."""
        for _ in self._threads:
            self._answers.put(None)
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while (entry := self._answers.get()) is not None:
            reply, answer = entry
            try:
                response, outcome = self._response(answer)
            except Exception as error:
                if not isinstance(error, VarlenError):
                    _log.exception("an answer could not be built")
                    error = EngineError("the answer could not be built; the server's log says why")
                response, outcome = _error_response(error)
            reply.respond(response, outcome)
            # an answer must not live on in this frame until the next one comes
            del entry, reply, answer, response

    def _response(
        self, answer: AnySequence[Float32Array] | Exception
    ) -> tuple[pb_utils.InferenceResponse, Outcome]:
        if isinstance(answer, Exception):
            return _error_response(answer)
        task = self._service.task
        array = wire.output_array(task, answer)
        _check_shared_memory(array.nbytes)
        return pb_utils.InferenceResponse([pb_utils.Tensor(wire.output_name(task), array)]), "ok"


def _error_response(error: Exception) -> tuple[pb_utils.InferenceResponse, Outcome]:
    outcome, code = next(row[1:] for row in _OUTCOMES if isinstance(error, row[0]))
    server_error = pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=server_error), outcome


def _check_shared_memory(size: int) -> None:
    """Raise EngineError if an answer of `size` bytes may not fit: the server has no way back from that."""
    if size < _LARGE_BYTES:
        return
    stat = os.statvfs(_SHARED_MEMORY)
    if stat.f_bavail * stat.f_frsize < 2 * size:
        raise EngineError(f"the server has too little shared memory for an answer of {size} bytes")
