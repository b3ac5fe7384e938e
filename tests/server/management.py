"""The calls that change a server: the ones it answers, and code that one runs."""

import base64
import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

TIMEOUT_SECONDS = 30.0
_PATHS = {
    "/v2/repository/models/{model}/load": ("POST",),
    "/v2/repository/models/{model}/unload": ("POST",),
    "/v2/trace/setting": ("GET", "POST"),
    "/v2/models/{model}/trace/setting": ("GET", "POST"),
    "/v2/logging": ("GET", "POST"),
} | {
    f"/v2/{kind}sharedmemory{path}": (method,)
    for kind in ("system", "cuda")
    for path, method in (
        ("/status", "GET"),
        ("/region/none/status", "GET"),
        ("/region/none/register", "POST"),
        ("/region/none/unregister", "POST"),
        ("/unregister", "POST"),
    )
}
_METHODS = {
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "TraceSetting",
    "LogSettings",
    *(
        f"{kind}SharedMemory{verb}"
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    ),
}
# Calls that clients need, and that change nothing.
_SERVED = {
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "ModelStreamInfer",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
}
# How the server refuses: a group of calls that is restricted, and the mode of model control.
_REFUSALS = ("is restricted", "explicit model load / unload is not allowed")
# What a page in a browser sends to any address without asking that address.
_FROM_A_PAGE = {"Content-Type": "text/plain;charset=UTF-8", "Origin": "https://example.org"}


def answered_calls(http_url: str, grpc_url: str, model: str) -> list[str]:
    """Return the calls of management that a server does not refuse."""
    found = []
    for path, methods in _PATHS.items():
        for method in methods:
            status, text = _send(http_url, method, path.format(model=model), {})
            if status < 400 or not any(refusal in text for refusal in _REFUSALS):
                found.append(f"{method} {path}: {status}")
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    # a call that is new must be put into one of the two sets
    assert {method.name for method in service.methods} == _METHODS | _SERVED
    with grpc.insecure_channel(grpc_url.removeprefix("grpc://")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name in sorted(_METHODS):
            kind = service.methods_by_name[name].input_type
            fields = {"model_name": model} if "model_name" in kind.fields_by_name else {}
            request = getattr(service_pb2, kind.name)(**fields)
            try:
                getattr(stub, name)(request, timeout=TIMEOUT_SECONDS)
            except grpc.RpcError as error:
                if any(refusal in error.details() for refusal in _REFUSALS):
                    continue
            found.append(name)
    return found


def load_code(http_url: str, marker: Path) -> tuple[int, str]:
    """Send a model as a page in a browser can; return status and answer.

    Where it is loaded, it writes the user who runs it into `marker`.
    """
    code = f"""
import os, pathlib
pathlib.Path({str(marker)!r}).write_text(str(os.geteuid()))

class TritonPythonModel:
    def execute(self, requests):
        return []
"""
    config = {
        "backend": "python",
        "input": [{"name": "in", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "out", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    parameters = {
        "config": json.dumps(config),
        "file:1/model.py": base64.b64encode(code.encode()).decode(),
    }
    body = {"parameters": parameters}
    return _send(http_url, "POST", "/v2/repository/models/from_a_page/load", body)


def _send(http_url: str, method: str, path: str, body: Any) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(http_url).netloc, timeout=TIMEOUT_SECONDS)
    try:
        content = json.dumps(body) if method == "POST" else None
        connection.request(method, path, content, _FROM_A_PAGE)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
