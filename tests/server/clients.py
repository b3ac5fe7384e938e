"""Minimal gRPC and HTTP clients that check nothing, so tests can send invalid requests.

Both raise `AnswerError` with the gRPC name of its code, whatever the protocol. Safe to use from several threads.
"""

import http.client
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2, service_pb2_grpc

from varlen_tools.local_server import LOOPBACK, LocalServer

Array: TypeAlias = npt.NDArray[Any]

# Longer than any answer takes on a busy machine; a request that times out counts as lost.
TIMEOUT_SECONDS = 300.0

_DTYPES: dict[str, type[np.generic]] = {"FP32": np.float32}
_CODE_OF_STATUS = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}


class AnswerError(Exception):
    """The server answered with an error, or not at all."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input on the wire; its bytes need not fit its shape."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes


def strings(*values: str | bytes) -> Tensor:
    """Return one string per row."""
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    data = b"".join(struct.pack("<I", len(value)) + value for value in encoded)
    return Tensor("BYTES", (len(values), 1), data)


def integers(rows: npt.ArrayLike) -> Tensor:
    """Return rows of equal length as INT64."""
    array = np.asarray(rows, dtype=np.int64)
    return Tensor("INT64", array.shape, array.tobytes())


def texts(*values: str) -> dict[str, Tensor]:
    """Return the inputs of a request of these texts."""
    return {"text": strings(*values)}


class Client(ABC):
    """A client of one of the protocols; `start` sends requests in the background."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=128)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @abstractmethod
    def infer(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> Array:
        """Return the first output of the answer, or raise AnswerError."""

    def start(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> "Future[Array]":
        """Send the request and return a future of its answer."""
        return self._pool.submit(self.infer, model, inputs, parameters, timeout)


class GrpcClient(Client):
    """Requests over one gRPC channel."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__()
        self._channel = grpc.insecure_channel(
            f"{LOOPBACK}:{server.grpc_port}",
            options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)],
        )
        self._infer = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelInfer

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self._channel.close()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> Array:
        try:
            answer = self._infer(_grpc_request(model, inputs, parameters or {}), timeout=timeout)
        except grpc.RpcError as error:
            raise AnswerError(error.code().name, error.details()) from None
        output = answer.outputs[0]
        return np.frombuffer(answer.raw_output_contents[0], _DTYPES[output.datatype]).reshape(
            output.shape
        )

    def call(
        self, model: str, inputs: Mapping[str, Tensor], timeout: float = TIMEOUT_SECONDS
    ) -> grpc.Future:
        """Send a request and return gRPC's own handle, which can cancel it."""
        return self._infer.future(_grpc_request(model, inputs, {}), timeout=timeout)


class HttpClient(Client):
    """Requests over HTTP with binary tensors, one connection per request."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__()
        self._port = server.http_port

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> Array:
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=timeout)
        try:
            connection.request("POST", *http_request(model, inputs, parameters or {}))
            return _read_http(connection.getresponse())
        except TimeoutError:
            raise AnswerError("DEADLINE_EXCEEDED", f"no answer in {timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise AnswerError("UNAVAILABLE", repr(error)) from None
        finally:
            connection.close()


def http_request(
    model: str, inputs: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> tuple[str, bytes, dict[str, str]]:
    """Return path, body and headers of an inference request."""
    entries = [
        {
            "name": name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for name, tensor in inputs.items()
    ]
    head = json.dumps(
        {"inputs": entries, "parameters": {**parameters, "binary_data_output": True}}
    ).encode()
    body = head + b"".join(tensor.data for tensor in inputs.values())
    return f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": str(len(head))}


def _read_http(response: http.client.HTTPResponse) -> Array:
    body = response.read()
    if response.status != 200:
        code = _CODE_OF_STATUS.get(response.status, str(response.status))
        raise AnswerError(code, json.loads(body)["error"])
    size = int(response.headers["Inference-Header-Content-Length"])
    output = json.loads(body[:size])["outputs"][0]
    data = body[size : size + output["parameters"]["binary_data_size"]]
    return np.frombuffer(data, _DTYPES[output["datatype"]]).reshape(output["shape"])


def _grpc_request(
    model: str, inputs: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, tensor in inputs.items():
        request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    fields = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for key, value in parameters.items():
        setattr(request.parameters[key], fields[type(value)], value)
    return request
