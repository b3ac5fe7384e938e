"""A small in-process KServe v2 server of a fake model, with gRPC and HTTP."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from aiohttp import web
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

from .fake_model import FakeModel, Fault, ReceivedRequest

STATUS = {
    # kind: (gRPC, HTTP), as the real server maps them
    "invalid": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "not_found": (grpc.StatusCode.NOT_FOUND, 404),
    "unavailable": (grpc.StatusCode.UNAVAILABLE, 503),
    "internal": (grpc.StatusCode.INTERNAL, 500),
    "python_backend": (grpc.StatusCode.INTERNAL, 500),
    "hang_up": (grpc.StatusCode.UNAVAILABLE, 0),
    # as gRPC reports a stream that a proxy has reset
    "reset": (grpc.StatusCode.UNKNOWN, 0),
}


def tensor_from_bytes(datatype: str, shape: list[int], raw: bytes) -> np.ndarray:
    if datatype == "BYTES":
        return deserialize_bytes_tensor(raw).reshape(shape)
    if datatype == "BOOL":
        return np.frombuffer(raw, dtype=np.bool_).reshape(shape)
    assert datatype == "INT64"
    return np.frombuffer(raw, dtype=np.int64).reshape(shape)


class GrpcServicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, model: FakeModel) -> None:
        self.model = model

    def ServerReady(self, request, context):  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=self.model.server_ready)

    def ModelReady(self, request, context):  # noqa: N802
        ready = (request.name, "READY") in self.model.models
        return service_pb2.ModelReadyResponse(ready=ready)

    def ServerMetadata(self, request, context):  # noqa: N802
        return service_pb2.ServerMetadataResponse(name="fake", version="0.1")

    def RepositoryIndex(self, request, context):  # noqa: N802
        response = service_pb2.RepositoryIndexResponse()
        for name, state in self.model.models:
            response.models.add(name=name, version="1", state=state)
        return response

    def ModelConfig(self, request, context):  # noqa: N802
        with grpc_faults(context):
            self.model.check_name(request.name)
        config = self.model.config()
        response = service_pb2.ModelConfigResponse()
        response.config.name = config["name"]
        response.config.backend = config["backend"]
        for group in config["instance_group"]:
            response.config.instance_group.add(count=group["count"])
        response.config.max_batch_size = config["max_batch_size"]
        for key, value in config["parameters"].items():
            response.config.parameters[key].string_value = value["string_value"]
        for given in config["input"]:
            response.config.input.add(name=given["name"], optional=given.get("optional", False))
        for output in config["output"]:
            response.config.output.add(name=output["name"], dims=output["dims"])
        return response

    def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        done = threading.Event()
        context.add_callback(lambda: done.is_set() or self.model.cancelled.set())
        for request in request_iterator:
            try:
                received = received_of(request, context)
                for outputs in self.model.generate(request.model_name, received):
                    arrays = {name: array_of(name, values) for name, values in outputs.items()}
                    response = grpc_response(arrays)
                    is_last = "None" not in outputs.get("finish_reason", [])
                    response.parameters["triton_final_response"].bool_param = is_last
                    yield service_pb2.ModelStreamInferResponse(infer_response=response)
                self.model.stopped.wait(self.model.holds_streams)
            except Fault as fault:
                done.set()
                if fault.kind == "reset":
                    context.abort(STATUS[fault.kind][0], str(fault))
                yield service_pb2.ModelStreamInferResponse(error_message=fault.stream_message)
        done.set()

    def ModelInfer(self, request, context):  # noqa: N802
        with grpc_faults(context):
            outputs = self.model.infer(request.model_name, received_of(request, context))
        return grpc_response(outputs)


def received_of(request, context) -> ReceivedRequest:
    tensors = {
        tensor.name: tensor_from_bytes(tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in request.parameters.items()
    }
    outputs = tuple(each.name for each in request.outputs)
    return ReceivedRequest(tensors, parameters, outputs, dict(context.invocation_metadata()))


def datatype_of(array: np.ndarray) -> str:
    if array.dtype.kind == "S":
        return "BYTES"
    return array.dtype.name.upper().replace("FLOAT", "FP")


def bytes_of(array: np.ndarray) -> bytes:
    if array.dtype.kind != "S":
        return array.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in array.ravel().tolist())


def array_of(name: str, values: list[Any]) -> np.ndarray:
    """Return an output of a generated answer."""
    if isinstance(values[0], str):
        return np.array([text.encode() for text in values])
    dtypes = {"output_ids": np.int64, "score": np.float32}
    return np.array(values, dtypes.get(name, np.uint32))


def grpc_response(outputs: dict[str, np.ndarray]) -> Any:
    response = service_pb2.ModelInferResponse()
    for name, array in outputs.items():
        response.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        response.raw_output_contents.append(bytes_of(array))
    return response


@contextmanager
def grpc_faults(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except Fault as fault:
        context.abort(STATUS[fault.kind][0], str(fault))


def http_app(model: FakeModel) -> web.Application:
    def ready(is_ready: bool) -> web.Response:
        return web.Response(status=200 if is_ready else 400)

    async def server_ready(request: web.Request) -> web.Response:
        return ready(model.server_ready)

    async def model_ready(request: web.Request) -> web.Response:
        return ready((request.match_info["name"], "READY") in model.models)

    async def metadata(request: web.Request) -> web.Response:
        return web.json_response({"name": "fake", "version": "0.1", "extensions": []})

    async def index(request: web.Request) -> web.Response:
        return web.json_response(
            [{"name": name, "version": "1", "state": state} for name, state in model.models]
        )

    async def config(request: web.Request) -> web.Response:
        try:
            model.check_name(request.match_info["name"])
        except Fault as fault:
            return http_fault(request, fault)
        return web.json_response(model.config())

    async def infer(request: web.Request) -> web.Response:
        body = await request.read()
        at = int(request.headers["Inference-Header-Content-Length"])
        header = json.loads(body[:at])
        tensors = {}
        for tensor in header["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            raw = body[at : at + size]
            tensors[tensor["name"]] = tensor_from_bytes(tensor["datatype"], tensor["shape"], raw)
            at += size
        names = tuple(output["name"] for output in header["outputs"])
        parameters = header.get("parameters", {})
        received = ReceivedRequest(tensors, parameters, names, request.headers)
        try:
            outputs = await asyncio.get_running_loop().run_in_executor(
                pool, model.infer, request.match_info["name"], received
            )
        except Fault as fault:
            return http_fault(request, fault)
        described = [
            {
                "name": name,
                "datatype": datatype_of(array),
                "shape": array.shape,
                "parameters": {"binary_data_size": len(bytes_of(array))},
            }
            for name, array in outputs.items()
        ]
        response = json.dumps({"model_name": model.name, "outputs": described}).encode()
        raw = b"".join(map(bytes_of, outputs.values()))
        return web.Response(
            body=response + raw, headers={"Inference-Header-Content-Length": str(len(response))}
        )

    pool = ThreadPoolExecutor(32)
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/v2/health/ready", server_ready)
    app.router.add_get("/v2/models/{name}/ready", model_ready)
    app.router.add_get("/v2", metadata)
    app.router.add_post("/v2/repository/index", index)
    app.router.add_get("/v2/models/{name}/config", config)
    app.router.add_post("/v2/models/{name}/infer", infer)
    app.router.add_post("/v2/models/{name}/generate", generate_handler(model, pool))
    app.router.add_post("/v2/models/{name}/generate_stream", generate_handler(model, pool))
    return app


def generate_handler(
    model: FakeModel, pool: ThreadPoolExecutor
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of the endpoints `generate` and `generate_stream`."""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tensors = {name: np.array(value, ndmin=1) for name, value in body.items()}
        received = ReceivedRequest(tensors, {}, headers=request.headers)
        responses = model.generate(request.match_info["name"], received)
        streams = request.path.endswith("generate_stream")
        stream: web.StreamResponse | None = None
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    outputs = await loop.run_in_executor(pool, next, responses, None)
                    if outputs is None:
                        break
                    # one value is no list
                    content = {
                        name: values[0] if len(values) == 1 else values
                        for name, values in outputs.items()
                    }
                except Fault as fault:
                    if stream is None:
                        return http_fault(request, fault, event=streams)
                    if fault.kind == "reset":
                        assert request.transport is not None
                        request.transport.close()
                        return stream
                    content = {"error": fault.stream_message}
                if not streams:
                    # the request has ended before its client reads the answer
                    responses.close()
                    return web.json_response(content)
                if stream is None:
                    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                    await stream.prepare(request)
                await stream.write(f"data: {json.dumps(content)}\n\n".encode())
                if "error" in content:
                    break
        except (asyncio.CancelledError, ConnectionError):
            model.cancelled.set()
            raise
        assert stream is not None
        return stream

    return generate


def http_fault(request: web.Request, fault: Fault, *, event: bool = False) -> web.Response:
    if fault.kind in ("hang_up", "reset"):
        assert request.transport is not None
        request.transport.close()
        return web.Response()
    message = fault.stream_message if "generate" in request.path else str(fault)
    content, status = json.dumps({"error": message}), STATUS[fault.kind][1]
    if event:
        return web.Response(text=f"data: {content}\n\n", status=status)
    return web.json_response(text=content, status=status)


@dataclass
class FakeServer:
    url: str
    model: FakeModel


# A certificate of the name models.test that signs itself, and its key.
TLS = Path(__file__).parent / "tls"
CERTIFICATE, KEY = TLS / "models.test.crt", TLS / "models.test.key"


def serve_grpc(
    model: FakeModel, at: str = "127.0.0.1:0", *, tls: bool = False
) -> Iterator[FakeServer]:
    server = grpc.server(ThreadPoolExecutor(32))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcServicer(model), server)
    if tls:
        pair = KEY.read_bytes(), CERTIFICATE.read_bytes()
        port = server.add_secure_port(at, grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port(at)
    server.start()
    host = at.partition(":")[0]
    yield FakeServer(f"{'grpcs' if tls else 'grpc'}://{host}:{port}", model)
    model.stopped.set()
    server.stop(grace=0).wait()


def serve_http(
    model: FakeModel, at: str = "127.0.0.1:0", *, tls: bool = False
) -> Iterator[FakeServer]:
    host, _, wanted = at.partition(":")
    context: ssl.SSLContext | None = None
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(CERTIFICATE, KEY)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(http_app(model), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, int(wanted), ssl_context=context)
        await site.start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield FakeServer(f"{'https' if tls else 'http'}://{host}:{port}", model)
    model.stopped.set()
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
