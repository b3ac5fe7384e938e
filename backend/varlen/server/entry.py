"""The model class that Triton Inference Server loads.

The server punishes some mistakes with a crash, a hung client or a model that never unloads:

* `execute` never raises, and returns None at once: responses leave later from sender threads.
* Every request gets exactly one final response, on every path (`server_replies`).
* The module is imported twice per load, once only to complete the configuration.
* The server shows a load error to its clients, with the file of each frame: messages and frames name no path.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import triton_python_backend_utils as pb_utils

from varlen.config import EngineConfig
from varlen.errors import DrainingError, EngineError, ModelFaultError, RequestError, VarlenError
from varlen.intake.pool import PoolLimits, TokenizerPool
from varlen.models.checkpoint_folder import Checkpoint
from varlen.processes import drop_library_pages, freeze_objects, return_large_memory
from varlen.request.request import Draft, Request, check_probe
from varlen.server.config import (
    gpu_of_instance,
    is_decoupled,
    num_warmup_requests,
    read_model,
    tensor_entry,
    tensors_of,
)
from varlen.server.draining import STATES, DrainWatch, marker_of
from varlen.server.kinds import ServedKind, kind_of
from varlen.server.process import (
    MemoryTrimmer,
    check_numpy,
    close_inherited_sockets,
    end_process_soon,
    log_to_server,
    server_caches,
    server_starts,
    start_exporter,
    start_watchdog,
)
from varlen.server.replies import Outbox, ServerReply
from varlen.server.shared_memory import hide_pool
from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric, Stats
from varlen.telemetry.tracing import RequestTracer

if TYPE_CHECKING:
    from varlen.service.service import Service

_log = logging.getLogger(__name__)

# Longest time from the load, or the last answer to a row of `model_warmup`, to the next row.
_WARMUP_PAUSE_SECONDS = 10.0

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _without_path(function: _Function) -> _Function:
    """Return the function; tracebacks name its module instead of its file."""
    function.__code__ = function.__code__.replace(co_filename=__name__)
    return function


@dataclass(frozen=True, slots=True)
class _Arrived:
    reply: ServerReply
    form: Any
    kind: ServedKind
    service: Service[Any]
    stats: Stats

    def accept(self, request: Request) -> None:
        """Submit the request with its tokens, from a tokenizer thread if it came as text."""
        check_probe(request)
        if trace := self.reply.trace:
            trace.accept(rows=len(request.prompts), tokens=request.num_tokens)
            request = replace(request, trace=trace)
        self.reply.expect(self.kind.answer(request, self.form))
        if request.prompts:
            self.service.model.submit(request, self.reply)
            if request.options.adapter:
                self.stats.count_adapter(request.options.adapter)
        else:
            # its steps have written the answer
            self.reply.finish()


class TritonPythonModel:
    """One instance of a model on the server."""

    _watchdog: subprocess.Popen[bytes] | None = None

    @staticmethod
    @_without_path
    def auto_complete_config(
        auto_complete_model_config: pb_utils.ModelConfig,
    ) -> pb_utils.ModelConfig:
        """Return the configuration with its missing inputs, outputs and row limit filled in."""
        try:
            return _completed(auto_complete_model_config)
        except Exception as error:
            raise _load_error(error) from None

    @_without_path
    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and start its threads.

        Raises:
            TritonModelException: the configuration or the checkpoint cannot be served; the message says why.
        """
        try:
            self._load(args)
        except Exception as error:
            self._end_watchdog()
            if isinstance(error, ModelFaultError):
                end_process_soon()
            raise _load_error(error) from None
        freeze_objects()
        drop_library_pages()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Enqueue the requests, or answer at once with an error. Never raises."""
        for request in requests:
            try:
                reply = self._outbox.reply_to(request, is_warmup=self._is_warmup(request))
            except Exception:
                # without a sender there is no way to answer
                _log.exception("a request has no response sender")
                continue
            self._submit(request, reply)

    def is_ready(self) -> bool:
        """Return whether the engine runs, and the replica is not about to stop."""
        return self._service.is_ready and self._drain.state == "serving"

    def finalize(self) -> None:
        """Stop the threads. The server calls this once every request has been answered."""
        self._pool.close()
        if not self._service.close():
            end_process_soon()
        self._outbox.close()
        self._tracer.close()
        if self._exporter is not None:
            self._exporter.close()
        self._trimmer.close()
        self._end_watchdog()

    def _end_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()

    def _load(self, args: dict[str, str]) -> None:
        # first: a server that is killed while this model loads takes this process with it
        self._watchdog = start_watchdog(args["model_instance_name"])
        close_inherited_sockets()
        hide_pool()
        log_to_server(args["model_name"], args["model_version"])
        return_large_memory()
        model_config = json.loads(args["model_config"])
        # before the engine's thread starts: an error after that would leave the thread running
        model = read_model(model_config, _open_checkpoint, server_caches=server_caches())
        config, checkpoint, kind = model.config, model.checkpoint, kind_of(model.task)
        log_to_server(args["model_name"], args["model_version"], config.log_level)
        for note in model.notes:
            _log.warning("%s", note)
        check_numpy()

        self._warmup_requests = num_warmup_requests(model_config)
        self._uses_timeout = not config.ignore_request_timeout
        self._stats = Stats()
        self._service = _load_service(
            kind, checkpoint.folder, config, self._stats, gpu=gpu_of_instance(args)
        )
        self._kind = kind(self._service, decoupled=is_decoupled(model_config))
        limits = PoolLimits(
            config.max_queued_requests,
            config.max_queued_text_bytes,
            waiting_elsewhere=lambda: self._service.waiting_requests,
        )
        # a process fills in templates
        at_once = not self._service.checkpoint.chat_templates
        self._pool = TokenizerPool(limits, self._stats, at_once=at_once)
        self._pool.start()
        self._tracer = RequestTracer(args["model_name"], args["model_version"])
        self._outbox = Outbox(self._stats, names_codes=kind.streams, tracer=self._tracer)
        marker = marker_of(os.getppid())
        # a server that has ended takes this process with it
        assert marker is not None
        self._drain = DrainWatch(marker)
        adapters = [name for name, reason in self._service.intake.adapters.items() if not reason]
        self._exporter = start_exporter(args, self._stats, self._snapshot, adapters)
        self._trimmer = MemoryTrimmer()

    def _is_warmup(self, request: pb_utils.InferenceRequest) -> bool:
        """Return whether the server made a request from `model_warmup`.

        It sends those first, without an id, and each at once after the answers to others.
        """
        pause = time.monotonic() - self._outbox.last_warmup
        if self._warmup_requests and (request.request_id() or pause > _WARMUP_PAUSE_SECONDS):
            # this server has sent fewer
            self._warmup_requests = 0
        is_warmup = self._warmup_requests > 0
        self._warmup_requests -= is_warmup
        return is_warmup

    def _submit(self, request: pb_utils.InferenceRequest, reply: ServerReply) -> None:
        try:
            draft, form = self._kind.read(
                {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                _parameters(request),
                request.requested_output_names(),
                request.timeout() if self._uses_timeout else 0,
            )
            self._check_draining(draft)
            reply.accept()
            arrived = _Arrived(reply, form, self._kind, self._service, self._stats)
            if draft.num_bytes:
                self._pool.submit(draft, reply, arrived.accept, arrival=reply.arrival)
            else:
                arrived.accept(replace(draft.complete(), arrival=reply.arrival))
        except VarlenError as error:
            reply.fail(error)
        except BaseException:
            # also a library's panic
            _log.exception("a request could not be read")
            reply.fail(EngineError("the request could not be read; the server's log says why"))

    def _check_draining(self, draft: Draft) -> None:
        try:
            self._drain.check(is_probe=draft.options.probe)
        except DrainingError:
            self._stats.count_refusal("draining")
            raise

    def _snapshot(self) -> MetricsSnapshot:
        requests, num_bytes = self._pool.depth
        values = dict(self._service.snapshot())
        values[SnapshotMetric.QUEUED_REQUESTS] += requests
        values[SnapshotMetric.QUEUED_TEXT_BYTES] = num_bytes
        values[SnapshotMetric.OPEN_REQUESTS] = self._outbox.open_requests
        values[SnapshotMetric.DRAINING] = STATES.index(self._drain.state)
        return values


def _load_service(
    kind: type[ServedKind], folder: Path, config: EngineConfig, stats: Stats, *, gpu: int
) -> Service[Any]:
    _set_environment(kind)
    parts = kind.parts()
    from varlen.service.service import Service

    return Service.load(parts, folder, config, stats, gpu=gpu, isolated=True)


def _set_environment(kind: type[ServedKind]) -> None:
    for name, value in kind.environment.items():
        os.environ.setdefault(name, value)


def _open_checkpoint(config: EngineConfig) -> Checkpoint:
    return Checkpoint.open(pb_utils.get_model_dir(), **config.of_checkpoint)


def _completed(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
    given = config.as_dict()
    log_to_server(given["name"], Path(pb_utils.get_model_dir()).name)
    model = read_model(given, _open_checkpoint, is_complete=False, server_caches=server_caches())
    kind = kind_of(model.task)
    if server_starts():
        _set_environment(kind)
        from varlen.execution.workers.process import start_early

        start_early(model.checkpoint.folder, model.config, generates=kind.streams)
    inputs, outputs = tensors_of(model.task, model.checkpoint, model.config.further_tasks)
    # what the user wrote stays
    if not given["input"]:
        for spec in inputs:
            config.add_input(tensor_entry(spec) | {"optional": spec.optional})
    if not given["output"]:
        for spec in outputs:
            config.add_output(tensor_entry(spec))
    if kind.streams:
        # without it nothing can be streamed
        if "model_transaction_policy" not in given:
            config.set_model_transaction_policy({"decoupled": True})
    elif not given["max_batch_size"]:
        config.set_max_batch_size(kind.max_rows)
    return config


def _parameters(request: pb_utils.InferenceRequest) -> str:
    try:
        return request.parameters()
    except UnicodeDecodeError:
        # the server's HTTP frontend passes any bytes on
        raise RequestError(
            "the name or value of a request parameter is not UTF-8; send UTF-8"
        ) from None


def _load_error(error: Exception) -> pb_utils.TritonModelException:
    """Return a load error for clients, without paths and traceback."""
    if not isinstance(error, VarlenError):
        _log.error("the model could not be loaded", exc_info=error)
        return pb_utils.TritonModelException(
            "the model could not be loaded; the server's log says why"
        )
    message = str(error)
    folder = pb_utils.get_model_dir()
    # the checkpoint may be a link, and its path named either way
    for path in sorted({folder, os.path.realpath(folder)}, key=len, reverse=True):
        message = message.replace(path, "the checkpoint folder")
    return pb_utils.TritonModelException(message)
