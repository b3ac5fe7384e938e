"""The gRPC transport, on tritonclient.grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException

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

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", triton_grpc.MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", triton_grpc.MAX_GRPC_MESSAGE_SIZE),
    # After a refused connection a channel fails every call for 1 s to 120 s by default, so retries
    # would fail without a connection attempt. With short waits, session.py decides the back-off.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

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
        self._client = triton_grpc.InferenceServerClient(
            endpoint.peer,
            ssl=endpoint.tls,
            root_certificates=None if ca_file is None else str(ca_file),
            channel_args=options,
        )

    async def server_ready(self) -> bool:
        with self._errors():
            return bool(await self._client.is_server_ready())

    async def model_ready(self, model: str) -> bool:
        with self._errors():
            return bool(await self._client.is_model_ready(model))

    async def server_identity(self) -> ServerIdentity:
        with self._errors():
            metadata = await self._client.get_server_metadata()
        return ServerIdentity(metadata.name, metadata.version)

    async def models(self) -> list[ModelState]:
        with self._errors():
            index = await self._client.get_model_repository_index()
        return [ModelState(model.name, model.version, model.state) for model in index.models]

    async def model_config(self, model: str) -> Mapping[str, object]:
        with self._errors():
            response = await self._client.get_model_config(model, as_json=True)
        config: Mapping[str, object] = response["config"]
        return config

    async def infer(self, model: str, request: InferRequest) -> Arrays:
        inputs = [_infer_input(tensor) for tensor in request.tensors]
        with self._errors():
            result = await self._client.infer(
                model,
                inputs,
                outputs=[triton_grpc.InferRequestedOutput(name) for name in request.outputs],
                parameters=dict(request.parameters),
                headers=trace_headers(),
            )
        return {name: result.as_numpy(name) for name in request.outputs}

    async def generate(
        self, model: str, request: GenerateRequest
    ) -> AsyncGenerator[Response, None]:
        async def requests() -> AsyncGenerator[dict[str, Any], None]:
            inputs = [_infer_input(tensor) for tensor in request.tensors()]
            yield {"model_name": model, "inputs": inputs}

        with self._errors():
            call = self._client.stream_infer(requests(), headers=trace_headers())
            is_last = False
            try:
                async for result, error in call:
                    # the server ends the stream after an error
                    is_last = error is not None or _is_final(result)
                    if is_last:
                        self._read_to_end(call)
                    if error is not None:
                        raise error
                    yield _response(result)
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
            await self._client.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            raise self._error(error.message(), error.status()) from None
        except grpc.RpcError as error:
            # tritonclient does not convert the errors of streams
            raise self._error(error.details(), str(error.code())) from None

    def _error(self, text: str | None, status: str | None) -> VarlenClientError:
        error = server_error(text, status, _ERRORS)
        is_lost = isinstance(error, ServerUnavailable) and _is_connection_failure(str(error))
        # gRPC reports a stream that a proxy resets as UNKNOWN or INTERNAL
        if is_lost or str(error).startswith("Stream removed"):
            return ServerUnavailable(f"no connection to grpc server {self._label}: {error}")
        return error


def _infer_input(tensor: Tensor) -> triton_grpc.InferInput:
    shape = list(tensor.array.shape)
    infer_input = triton_grpc.InferInput(tensor.name, shape, tensor.datatype)
    return infer_input.set_data_from_numpy(tensor.array)


async def _read_to_end(call: Any) -> None:
    """Read a stream to its end; cancel it if it does not end."""

    async def read() -> None:
        async for _ in call:
            pass

    # the answer is complete: an error changes nothing
    with suppress(TimeoutError, InferenceServerException, grpc.RpcError):
        await with_timeout(read(), _END_SECONDS)


def _is_final(result: triton_grpc.InferResult) -> bool:
    """Return whether the server says that a response is the last one."""
    parameters = result.get_response().parameters
    return "triton_final_response" in parameters and bool(
        parameters["triton_final_response"].bool_param
    )


def _response(result: triton_grpc.InferResult) -> Response:
    outputs: dict[str, list[Any]] = {}
    for output in result.get_response().outputs:
        values = result.as_numpy(output.name).ravel().tolist()
        # strings are bytes here
        outputs[output.name] = [
            each.decode(errors="replace") if isinstance(each, bytes) else each for each in values
        ]
    return outputs


def _is_connection_failure(message: str) -> bool:
    return message.startswith(("failed to connect", "Socket closed", "recvmsg", "Stream removed"))
