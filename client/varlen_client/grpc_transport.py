"""The gRPC transport, on tritonclient.grpc.aio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException

from varlen_client.endpoint import Endpoint
from varlen_client.errors import (
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.transport import ServerIdentity, refined, server_message
from varlen_client.wire import InferRequest, ModelState

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", triton_grpc.MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", triton_grpc.MAX_GRPC_MESSAGE_SIZE),
    # By default a channel that was refused waits 1 s to 120 s and fails every call meanwhile: our
    # retries would only see that wait. Short waits leave the back-off to retry.py.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

_ERRORS: dict[str, type[VarlenClientError]] = {
    "StatusCode.INVALID_ARGUMENT": InvalidRequest,
    "StatusCode.NOT_FOUND": ModelNotFound,
    "StatusCode.UNAVAILABLE": ServerUnavailable,
    "StatusCode.DEADLINE_EXCEEDED": RequestTimeout,
    "StatusCode.CANCELLED": RequestCancelled,
}


class GrpcTransport:
    """Calls over one HTTP/2 channel. Cancelling a task cancels its call at the server."""

    def __init__(self, endpoint: Endpoint, ca_file: Path | None) -> None:
        self._target = endpoint.target
        self._client = triton_grpc.InferenceServerClient(
            endpoint.target,
            ssl=endpoint.tls,
            root_certificates=None if ca_file is None else str(ca_file),
            channel_args=_CHANNEL_OPTIONS,
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
            answer = await self._client.get_model_config(model, as_json=True)
        config: Mapping[str, object] = answer["config"]
        return config

    async def infer(self, model: str, request: InferRequest) -> npt.NDArray[np.generic] | None:
        inputs = []
        for tensor in request.tensors:
            slot = triton_grpc.InferInput(tensor.name, list(tensor.array.shape), tensor.datatype)
            inputs.append(slot.set_data_from_numpy(tensor.array))
        with self._errors():
            result = await self._client.infer(
                model,
                inputs,
                outputs=[triton_grpc.InferRequestedOutput(request.output)],
                parameters=dict(request.parameters),
            )
        output: npt.NDArray[np.generic] | None = result.as_numpy(request.output)
        return output

    async def close(self) -> None:
        await self._client.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            message = server_message(error.message(), error.status())
            kind = refined(_ERRORS.get(error.status() or "", ServerError), message)
            if kind is ServerUnavailable and _is_about_the_connection(message):
                message = f"no connection to grpc server {self._target}: {message}"
            raise kind(message) from None


def _is_about_the_connection(message: str) -> bool:
    return message.startswith(("failed to connect", "Socket closed", "recvmsg", "Stream removed"))
