"""A small in-process KServe v2 server for the client's tests, with gRPC and HTTP.

A `FakeModel` computes every output from the input alone, so tests can check order and batching. It can inject faults,
delays and closed connections, and it records the requests that it receives.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from aiohttp import web
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

from varlen_client import Client, RetryPolicy

FAST_RETRIES = RetryPolicy(max_retries=3, first_delay=0.01, max_delay=0.02)

# Outputs beside the first one of a task: name, type and dims.
MORE_OUTPUTS = {
    "classify": {"scores": [2], "labels": [2]},
    "rerank": {"scores": [1], "labels": [1]},
    "fill_mask": {"scores": [-1, -1], "tokens": [-1, -1], "num_masks": [1]},
    "token_classify": {"scores": [-1, 2], "labels": [2], "tokens": [-1], "num_tokens": [1]},
    "sparse_embed": {"values": [-1], "terms": [-1], "num_terms": [1]},
}
OUTPUTS = {
    "embed": ("sentence_embedding", [3]),
    "sparse_embed": ("indices", [-1]),
    "fill_mask": ("token_ids", [-1, -1]),
    "classify": ("logits", [2]),
    "rerank": ("logits", [1]),
    "token_classify": ("logits", [-1, 2]),
    "hidden": ("last_hidden_state", [-1, 3]),
    "token_embed": ("token_embeddings", [-1, 3]),
    "generate": ("text_output", [-1]),
    "translate": ("text_output", [-1]),
}
STATUS = {
    # kind: (gRPC, HTTP), as the real server maps them
    "invalid": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "not_found": (grpc.StatusCode.NOT_FOUND, 404),
    "unavailable": (grpc.StatusCode.UNAVAILABLE, 503),
    "internal": (grpc.StatusCode.INTERNAL, 500),
    "hang_up": (grpc.StatusCode.UNAVAILABLE, 0),
}


class Fault(Exception):  # noqa: N818 - injected, not a failure of the test
    """A failure that the fake server injects: a key of STATUS and a message."""

    def __init__(self, kind: str, message: str = "injected") -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def stream_message(self) -> str:
        """The message with its code, as the backend sends it in a stream."""
        code = {"invalid": "INVALID_ARG"}.get(self.kind, self.kind.upper())
        return f"{code}: {self}"


@dataclass
class ReceivedRequest:
    """One request, as the server received it."""

    tensors: dict[str, np.ndarray]
    parameters: dict[str, Any]
    outputs: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of HTTP, or the metadata of gRPC."""

    @property
    def num_rows(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of a request to generate."""
        return json.loads(self.tensors["sampling_parameters"][0])

    @property
    def prompt(self) -> str:
        """The text of a request to generate, in capitals."""
        text = self.tensors["text_input"][0]
        return (text.decode() if isinstance(text, bytes) else text).upper()

    @property
    def texts(self) -> list[str]:
        return [text.decode() for text in self.tensors["text"].ravel()]


@dataclass
class FakeModel:
    name: str = "fake"
    task: str = "embed"
    shows_task: bool = True
    """Whether the config names the task."""
    more_settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameters of the config beside the task."""
    max_batch_size: int = 8
    server_ready: bool = True
    models: list[tuple[str, str]] = field(default_factory=lambda: [("fake", "READY")])
    faults: list[Fault] = field(default_factory=list)
    """Each request consumes one, before `refuse` is called."""
    refuse: Callable[[ReceivedRequest], Fault | None] = lambda received: None
    delay: Callable[[ReceivedRequest], float] = lambda received: 0.0
    output_dtype: type = np.float32
    has_scores: bool = True
    """Whether a classifier has more outputs than its logits."""
    counts_tokens: bool = False
    """Whether a model has the output num_tokens, here of one token per character."""
    returns_score: bool = True
    most_answers: int = 99
    """A search finds no more answers than these."""
    fail_after: tuple[int, Fault] | None = None
    """Number of parts of a generated answer, and the fault that comes then."""
    ends_after: int | None = None
    """Number of parts of a generated answer that has no last one."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when a client leaves before its answer is complete."""
    requests: list[ReceivedRequest] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def config(self) -> dict[str, Any]:
        output, dims = OUTPUTS[self.task]
        parameters = {"task": {"string_value": self.task}} if self.shows_task else {}
        return {
            "name": self.name,
            "max_batch_size": self.max_batch_size,
            "output": [
                {"name": name, "data_type": "TYPE_FP32", "dims": dims}
                for name, dims in {output: dims, **self.more_outputs}.items()
            ],
            "parameters": parameters | self.more_settings,
        }

    def check_name(self, name: str) -> None:
        if name not in [model for model, _ in self.models]:
            raise Fault("not_found", f"Request for unknown model: '{name}' is not found")

    @property
    def more_outputs(self) -> dict[str, list[int]]:
        """Dims of the outputs beside the first one."""
        more = MORE_OUTPUTS.get(self.task, {}) if self.has_scores else {}
        return {**more, "num_tokens": [1]} if self.counts_tokens else more

    def infer(self, name: str, received: ReceivedRequest) -> dict[str, np.ndarray]:
        self.check_name(name)
        with self.lock:
            self.requests.append(received)
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            fault = self.faults.pop(0) if self.faults else self.refuse(received)
        try:
            self.stopped.wait(self.delay(received))
            if fault is not None:
                raise fault
            if self.task == "sparse_embed":
                return sparse_outputs(received)
            if self.task == "fill_mask":
                return mask_outputs(received)
            if "tokens" in received.outputs:
                return token_label_outputs(received)
            main = self.form_of(self.output(received), received.parameters)
            outputs = {
                OUTPUTS[self.task][0]: main,
                "scores": main / 1000,
                "num_tokens": self.num_tokens(received),
                "labels": np.array(
                    [[f"über {i}".encode() for i in range(main.shape[-1])]] * len(main)
                ),
            }
            return {name: outputs[name] for name in received.outputs}
        finally:
            with self.lock:
                self.in_flight -= 1

    def generate(self, name: str, received: ReceivedRequest) -> Iterator[dict[str, list[Any]]]:
        """Yield the responses to a request: parts of one token, or one response.

        Token 3 of row 1 has the text "1.3 ". The delay comes before each response.
        """
        self.check_name(name)
        sampling = received.sampling
        with self.lock:
            self.requests.append(received)
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            fault = self.faults.pop(0) if self.faults else self.refuse(received)
        try:
            if fault is not None:
                raise fault
            yield from self.responses(received, sampling)
        finally:
            with self.lock:
                self.in_flight -= 1

    def responses(
        self, received: ReceivedRequest, sampling: dict[str, Any]
    ) -> Iterator[dict[str, list[Any]]]:
        tokens, rows = sampling.get("max_tokens", 4), sampling.get("n", 1)
        size = 1 if received.tensors["stream"][0] else tokens
        for number, begin in enumerate(range(0, tokens, size)):
            self.stopped.wait(self.delay(received))
            if self.fail_after and self.fail_after[0] == number:
                raise self.fail_after[1]
            if self.ends_after == number:
                return
            ids = range(begin, begin + size)
            is_last = begin + size == tokens
            logprobs = [
                {str(each): {"logprob": -0.5, "rank": 1, "decoded_token": f"token {each}"}}
                for each in ids
            ]
            response: dict[str, list[Any]] = {
                "text_output": ["".join(f"{row}.{each} " for each in ids) for row in range(rows)],
                "finish_reason": ["length" if is_last else "None"] * rows,
                "num_input_tokens": [7],
                "num_output_tokens": [size] * rows,
                "output_ids": [*ids] * rows,
            }
            if received.tensors["return_logprobs"][0]:
                response["logprobs"] = [json.dumps(logprobs)] * rows
            if self.task == "translate":
                response["text_output"] = [f"{received.prompt} {row}" for row in range(rows)]
            if rows > self.most_answers:
                # as the backend sends them
                missing = rows - self.most_answers
                response["num_output_tokens"][-missing:] = [0] * missing
                response["output_ids"] = [*ids] * self.most_answers
            if "return_score" in received.tensors and self.returns_score:
                response["score"] = [-0.5 * (row + 1) for row in range(rows)]
            yield response

    def num_tokens(self, received: ReceivedRequest) -> np.ndarray:
        lengths = [len(text) for text in received.texts] if "text" in received.tensors else []
        return np.array(lengths, dtype=np.int32)[:, None]

    def form_of(self, vectors: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
        """Return vectors with the dimensions and the dtype that a request asks for."""
        vectors = vectors[..., : parameters.get("dimensions")]
        dtype = parameters.get("output_dtype", "float32")
        if dtype == "ubinary":
            return np.packbits(vectors > 0, axis=1)
        return vectors.astype(self.output_dtype if dtype == "float32" else dtype)

    def output(self, received: ReceivedRequest) -> np.ndarray:
        if "input_ids" in received.tensors:
            ids = received.tensors["input_ids"]
            mask = received.tensors.get("attention_mask", np.ones_like(ids))
            return np.stack(
                [vector_of_ids(row[keep == 1]) for row, keep in zip(ids, mask, strict=True)]
            )
        pairs = [text.decode() for text in received.tensors.get("text_pair", np.array([])).ravel()]
        if self.task == "classify":
            return np.array(
                [
                    [len(text), len(pair)]
                    for text, pair in zip(received.texts, pairs or [""] * 999, strict=False)
                ]
            )
        if self.task == "rerank":
            return np.array(
                [[len(q) * 100 + len(d)] for q, d in zip(received.texts, pairs, strict=True)]
            )
        if self.task in ("token_classify", "hidden", "token_embed"):
            assert received.num_rows == 1, "rows of different lengths would be padded"
            words = received.texts[0].split()
            return np.array([[vector_of_text(word)[: OUTPUTS[self.task][1][1]] for word in words]])
        return np.stack([vector_of_text(text) for text in received.texts])


def sparse_outputs(received: ReceivedRequest) -> dict[str, np.ndarray]:
    """Return a term for each letter of a text, the later the larger its weight."""
    texts = received.texts
    shape = len(texts), max(map(len, texts))
    indices, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    terms = np.full(shape, b"", "S8")
    for row, text in enumerate(texts):
        letters = text[::-1]
        indices[row, : len(text)] = [ord(letter) for letter in letters]
        values[row, : len(text)] = range(len(text), 0, -1)
        terms[row, : len(text)] = [letter.encode() for letter in letters]
    counts = np.array([[len(text)] for text in texts], np.int32)
    outputs = {"indices": indices, "values": values, "num_terms": counts, "terms": terms}
    outputs["num_tokens"] = counts
    return {name: outputs[name] for name in received.outputs}


def mask_outputs(received: ReceivedRequest) -> dict[str, np.ndarray]:
    """Return tokens that count from the length of a text, for each "_" in it."""
    texts, top_k = received.texts, received.parameters.get("top_k", 2)
    counts = np.array([[text.count("_")] for text in texts], np.int32)
    token_ids = np.zeros((len(texts), counts.max(), top_k), np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : counts[row, 0]] = len(text) + np.arange(top_k)
    outputs = {
        "token_ids": token_ids,
        "scores": (1 / np.maximum(token_ids, 1)).astype(np.float32),
        "tokens": np.char.add("é", token_ids.astype(str)),
        "num_masks": counts,
    }
    outputs["tokens"] = np.char.encode(outputs["tokens"])
    return {name: outputs[name] for name in received.outputs}


def token_label_outputs(received: ReceivedRequest) -> dict[str, np.ndarray]:
    """Return a token for each word; capitals have the second label."""
    words = [text.split() for text in received.texts]
    counts = np.array([[len(row)] for row in words], np.int32)
    tokens = np.full((len(words), counts.max()), b"", dtype="S16")
    scores = np.zeros((*tokens.shape, 2), np.float32)
    for row, found in enumerate(words):
        tokens[row, : len(found)] = [word.encode() for word in found]
        scores[row, : len(found)] = [[0.25, 0.75 * word.isupper()] for word in found]
    labels = np.array([[b"O", "Ö".encode()]] * len(words))
    outputs = {"scores": scores, "labels": labels, "tokens": tokens, "num_tokens": counts}
    return {name: outputs[name] for name in received.outputs}


def vector_of_text(text: str) -> np.ndarray:
    return np.array([zlib.crc32(text.encode()) % 997, len(text), 1], dtype=np.float32)


def vector_of_ids(ids: np.ndarray) -> np.ndarray:
    return np.array([ids.sum(), ids.size, 2], dtype=np.float32)


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
        response.config.max_batch_size = config["max_batch_size"]
        for key, value in config["parameters"].items():
            response.config.parameters[key].string_value = value["string_value"]
        for output in config["output"]:
            response.config.output.add(name=output["name"], dims=output["dims"])
        return response

    def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        done = threading.Event()
        context.add_callback(lambda: done.is_set() or self.model.cancelled.set())
        for request in request_iterator:
            try:
                for outputs in self.model.generate(
                    request.model_name, received_of(request, context)
                ):
                    yield service_pb2.ModelStreamInferResponse(infer_response=grpc_outputs(outputs))
            except Fault as fault:
                done.set()
                yield service_pb2.ModelStreamInferResponse(error_message=fault.stream_message)
        done.set()

    def ModelInfer(self, request, context):  # noqa: N802
        with grpc_faults(context):
            outputs = self.model.infer(request.model_name, received_of(request, context))
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        for name, array in outputs.items():
            response.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
            response.raw_output_contents.append(bytes_of(array))
        return response


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
    names = {"i4": "INT32", "f2": "FP16", "f4": "FP32", "f8": "FP64", "i1": "INT8", "u1": "UINT8"}
    return "BYTES" if array.dtype.kind == "S" else names[array.dtype.str[1:]]


def bytes_of(array: np.ndarray) -> bytes:
    if array.dtype.kind != "S":
        return array.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in array.ravel().tolist())


def grpc_outputs(outputs: dict[str, list[Any]]) -> Any:
    response = service_pb2.ModelInferResponse()
    for name, values in outputs.items():
        if isinstance(values[0], str):
            datatype = "BYTES"
            raw = b"".join(
                len(text).to_bytes(4, "little") + text for text in map(str.encode, values)
            )
        else:
            datatype = {"output_ids": "INT64", "score": "FP32"}.get(name, "UINT32")
            dtype = {"INT64": np.int64, "FP32": np.float32, "UINT32": np.uint32}[datatype]
            raw = np.array(values, dtype).tobytes()
        response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        response.raw_output_contents.append(raw)
    return response


class grpc_faults:  # noqa: N801 - used as a function
    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, Fault):
            self.context.abort(STATUS[error.kind][0], str(error))


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
    if fault.kind == "hang_up":
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve_grpc(model: FakeModel) -> Iterator[FakeServer]:
    server = grpc.server(ThreadPoolExecutor(32))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcServicer(model), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield FakeServer(f"grpc://127.0.0.1:{port}", model)
    model.stopped.set()
    server.stop(grace=0).wait()


def serve_http(model: FakeModel) -> Iterator[FakeServer]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(http_app(model), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield FakeServer(f"http://127.0.0.1:{port}", model)
    model.stopped.set()
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=["grpc", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """A fake server of each protocol; its behaviour is set on `server.model`."""
    yield from (serve_grpc if request.param == "grpc" else serve_http)(FakeModel())


@pytest.fixture(params=["grpc", "http"])
def unused_url(request: pytest.FixtureRequest) -> str:
    """URL of a port on which no server listens."""
    return f"{request.param}://127.0.0.1:{free_port()}"


@pytest.fixture(params=["grpc", "http"])
def server_that_hangs_up(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[int]]]:
    """URL of a server that accepts and closes every connection, and the list of connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[int] = []

    def hang_up() -> None:
        while True:
            try:
                connection, (_, port) = listener.accept()
            except OSError:
                return
            with connection:
                connections.append(port)
                connection.recv(64)

    thread = threading.Thread(target=hang_up)
    thread.start()
    yield f"{request.param}://127.0.0.1:{listener.getsockname()[1]}", connections
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def fast_retries() -> RetryPolicy:
    """A policy of three retries, milliseconds apart."""
    return FAST_RETRIES


@pytest.fixture
def client(server: FakeServer, fast_retries: RetryPolicy) -> Iterator[Client]:
    """A sync client of the fake server."""
    with Client(server.url, retry=fast_retries) as client:
        yield client


@pytest.fixture
def fault() -> type[Fault]:
    """The type of the failures that a fake model injects."""
    return Fault


@pytest.fixture
def vectors_of() -> Callable[[list[Any]], np.ndarray]:
    """Return a function that computes the fake model's output for texts or token ids."""

    def expected(rows: list[Any]) -> np.ndarray:
        return np.stack(
            [
                vector_of_text(row) if isinstance(row, str) else vector_of_ids(np.array(row))
                for row in rows
            ]
        )

    return expected
