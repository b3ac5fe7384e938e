"""The gRPC transport: the messages and the stub of tritonclient, over a channel of asyncio.

Its client would check and copy each message once more, in Python (decision 0123).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy.typing as npt
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from varlen_client.errors import (
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
    RequestTimeout,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.generation import GenerateRequest, Response
from varlen_client.transport.endpoint import Endpoint
from varlen_client.transport.transport import ServerIdentity, server_error, trace_headers
from varlen_client.waits import cancel_all, with_timeout
from varlen_client.wire import Arrays, InferRequest, ModelState, Tensor

# -1 is no limit.
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # After a refused connection a channel fails every call for 1 s to 120 s by default, so retries
    # would fail without a connection attempt. With short waits, session.py decides the back-off.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

_Output = service_pb2.ModelInferRequest.InferRequestedOutputTensor
# Field of each kind of parameter.
_PARAMETERS = (
    (str, "string_param"),
    (bool, "bool_param"),
    (int, "int64_param"),
    (float, "double_param"),
)

# Beginnings of the messages of a lost connection.
_LOST = ("Stream removed", "failed to connect", "Socket closed", "recvmsg")
# A server ends a stream some milliseconds after its last response.
_END_SECONDS = 10.0

_ERRORS: dict[str, type[VarlenClientError]] = {
    "StatusCode.INVALID_ARGUMENT": InvalidRequest,
    "StatusCode.NOT_FOUND": ModelNotFound,
    "StatusCode.UNAVAILABLE": ServerUnavailable,
    "StatusCode.DEADLINE_EXCEEDED": RequestTimeout,
    "StatusCode.CANCELLED": RequestCancelled,
}


class GrpcTransport:
    """Transport over one HTTP/2 channel; cancelling a task cancels its request at the server.

    A stream is not cancelled once its last response has come: servers may keep a request for ever that is cancelled
    before its stream has ended, and never unload its model (decision 0074).
    """

    def __init__(self, endpoint: Endpoint, ca_file: Path | None) -> None:
        self._label = endpoint.label
        # streams whose last response has come
        self._ending: set[asyncio.Task[None]] = set()
        options: list[tuple[str, str | int]] = [*_CHANNEL_OPTIONS]
        if endpoint.address is not None:
            # requests and certificates are of the name, not of its address
            options.append(("grpc.default_authority", endpoint.target))
            if endpoint.tls:
                options.append(("grpc.ssl_target_name_override", endpoint.host))
        if endpoint.tls:
            trusted = grpc.ssl_channel_credentials(ca_file and ca_file.read_bytes())
            self._channel = grpc.aio.secure_channel(endpoint.peer, trusted, options)
        else:
            self._channel = grpc.aio.insecure_channel(endpoint.peer, options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def server_ready(self) -> bool:
        return bool((await self._ask("ServerReady")).ready)

    async def model_ready(self, model: str) -> bool:
        return bool((await self._ask("ModelReady", name=model)).ready)

    async def server_identity(self) -> ServerIdentity:
        metadata = await self._ask("ServerMetadata")
        return ServerIdentity(metadata.name, metadata.version)

    async def models(self) -> list[ModelState]:
        index = await self._ask("RepositoryIndex")
        return [ModelState(model.name, model.version, model.state) for model in index.models]

    async def model_config(self, model: str) -> Mapping[str, object]:
        response = await self._ask("ModelConfig", name=model)
        config: Mapping[str, object] = MessageToDict(
            response.config, preserving_proto_field_name=True
        )
        return config

    async def infer(self, model: str, request: InferRequest) -> Arrays:
        message = _message(model, request.tensors)
        message.outputs.extend(_Output(name=name) for name in request.outputs)
        for name, value in request.parameters.items():
            message.parameters[name].CopyFrom(_parameter(name, value))
        with self._errors():
            response = await self._stub.ModelInfer(message, metadata=_metadata())
        found = InferResult(response)
        return {name: found.as_numpy(name) for name in request.outputs}

    async def generate(
        self, model: str, request: GenerateRequest
    ) -> AsyncGenerator[Response, None]:
        async def requests() -> AsyncGenerator[Any, None]:
            yield _message(model, request.tensors())

        with self._errors():
            call = self._stub.ModelStreamInfer(requests(), metadata=_metadata())
            is_last = False
            try:
                async for each in call:
                    # the server ends the stream after an error
                    is_last = bool(each.error_message) or _is_final(each.infer_response)
                    if is_last:
                        self._read_to_end(call)
                    if each.error_message:
                        raise self._error(each.error_message, None)
                    yield _response(each.infer_response)
                    if is_last:
                        break
            finally:
                if not is_last:
                    # without effect once the stream has ended
                    call.cancel()

    def _read_to_end(self, call: Any) -> None:
        """Read a stream to its end in a task, so that nothing cancels it."""
        ending = asyncio.ensure_future(_read_to_end(call))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close the connection once the streams that are ending have ended."""
        try:
            if self._ending:
                await asyncio.wait(self._ending)
        finally:
            await cancel_all(list(self._ending))
            await self._channel.close()

    async def _ask(self, method: str, **fields: str) -> Any:
        """Return the answer of a method of the service to a request with these fields."""
        request = getattr(service_pb2, f"{method}Request")(**fields)
        with self._errors():
            return await getattr(self._stub, method)(request)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._error(error.details(), str(error.code())) from None

    def _error(self, text: str | None, status: str | None) -> VarlenClientError:
        error = server_error(text, status, _ERRORS)
        # gRPC reports a stream that a proxy resets as UNKNOWN or INTERNAL
        lost = _LOST if isinstance(error, ServerUnavailable) else _LOST[:1]
        if str(error).startswith(lost):
            return ServerUnavailable(f"no connection to grpc server {self._label}: {error}")
        return error


def _metadata() -> tuple[tuple[str, str], ...] | None:
    return tuple(trace_headers().items()) or None


def _message(model: str, tensors: Iterable[Tensor]) -> Any:
    """Return a request without outputs and parameters."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for each in tensors:
        message.inputs.add(name=each.name, datatype=each.datatype, shape=each.array.shape)
        content = each.array.tobytes() if each.datatype != "BYTES" else _packed(each.array)
        message.raw_input_contents.append(content)
    return message


def _packed(texts: npt.NDArray[Any]) -> bytes:
    """Return texts as a request has them: each behind its length."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts.ravel().tolist())


def _parameter(name: str, value: object) -> Any:
    """Return a parameter of a request."""
    # a flag is a whole number too
    for kind, field in _PARAMETERS:
        if isinstance(value, kind):
            return service_pb2.InferParameter(**{field: value})
    raise InvalidRequest(f"{name} is a {type(value).__name__}; send a text, a number or a flag")


async def _read_to_end(call: Any) -> None:
    """Read a stream to its end; cancel it if it does not end."""

    async def read() -> None:
        async for _ in call:
            pass

    # the answer is complete: an error changes nothing
    with suppress(TimeoutError, grpc.RpcError):
        await with_timeout(read(), _END_SECONDS)


def _is_final(response: Any) -> bool:
    """Return whether the server says that a response is the last one."""
    name = "triton_final_response"
    return name in response.parameters and bool(response.parameters[name].bool_param)


def _response(message: Any) -> Response:
    found, outputs = InferResult(message), dict[str, list[Any]]()
    for output in message.outputs:
        values = found.as_numpy(output.name).ravel().tolist()
        # strings are bytes here
        outputs[output.name] = [
            each.decode(errors="replace") if isinstance(each, bytes) else each for each in values
        ]
    return outputs
