"""Clients of the server's own protocol, KServe v2."""

from __future__ import annotations

import json
import queue
from typing import Any

from .table import DATE, MAX_TOKENS, PROMPT, TEXTS, Addresses, call

_OUTPUT = "sentence_embedding"
_TIMEOUT_SECONDS = 60
_GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS}


def _column(texts: list[str]) -> Any:
    """Return texts as the input of a model: [rows, 1] of bytes."""
    import numpy as np

    return np.array([[text.encode()] for text in texts], dtype=object)


def _input(library: Any, name: str, values: Any) -> Any:
    found = library.InferInput(name, list(values.shape), "BYTES")
    found.set_data_from_numpy(values)
    return found


@call("tritonclient", "vectors")
def tritonclient_http(at: Addresses) -> Any:
    from tritonclient import http

    with http.InferenceServerClient(at.http) as client:
        texts = _input(http, "text", _column(TEXTS))
        return client.infer("minilm", [texts]).as_numpy(_OUTPUT).tolist()


@call("tritonclient", "vectors")
def tritonclient_http_json(at: Addresses) -> Any:
    from tritonclient import http

    texts = http.InferInput("text", [len(TEXTS), 1], "BYTES")
    texts.set_data_from_numpy(_column(TEXTS), binary_data=False)
    vectors = http.InferRequestedOutput(_OUTPUT, binary_data=False)
    with http.InferenceServerClient(at.http) as client:
        return client.infer("minilm", [texts], outputs=[vectors]).as_numpy(_OUTPUT).tolist()


@call("tritonclient", "vectors")
def tritonclient_grpc(at: Addresses) -> Any:
    from tritonclient import grpc

    with grpc.InferenceServerClient(at.grpc) as client:
        texts = _input(grpc, "text", _column(TEXTS))
        return client.infer("minilm", [texts]).as_numpy(_OUTPUT).tolist()


@call("tritonclient", "vectors")
async def tritonclient_grpc_aio(at: Addresses) -> Any:
    from tritonclient.grpc import aio

    async with aio.InferenceServerClient(at.grpc) as client:
        answer = await client.infer("minilm", [_input(aio, "text", _column(TEXTS))])
    return answer.as_numpy(_OUTPUT).tolist()


@call("tritonclient", "vectors")
async def tritonclient_http_aio(at: Addresses) -> Any:
    from tritonclient.http import aio

    async with aio.InferenceServerClient(at.http) as client:
        answer = await client.infer("minilm", [_input(aio, "text", _column(TEXTS))])
    return answer.as_numpy(_OUTPUT).tolist()


@call("tritonclient", "vectors")
def tritonclient_shared_memory(at: Addresses) -> Any:
    import numpy as np
    from tritonclient import grpc
    from tritonclient.utils import serialize_byte_tensor, shared_memory

    texts = serialize_byte_tensor(_column(TEXTS)).item()
    shape = (len(TEXTS), 384)
    sizes = {"foreign_texts": len(texts), "foreign_vectors": 4 * shape[0] * shape[1]}
    regions = {
        name: shared_memory.create_shared_memory_region(name, f"/{name}", size)
        for name, size in sizes.items()
    }
    try:
        shared_memory.set_shared_memory_region(
            regions["foreign_texts"], [np.frombuffer(texts, dtype=np.uint8)]
        )
        with grpc.InferenceServerClient(at.grpc) as client:
            for name, size in sizes.items():
                client.register_system_shared_memory(name, f"/{name}", size)
            given = grpc.InferInput("text", [len(TEXTS), 1], "BYTES")
            given.set_shared_memory("foreign_texts", len(texts))
            wanted = grpc.InferRequestedOutput(_OUTPUT)
            wanted.set_shared_memory("foreign_vectors", sizes["foreign_vectors"])
            client.infer("minilm", [given], outputs=[wanted])
            for name in sizes:
                client.unregister_system_shared_memory(name)
        vectors = shared_memory.get_contents_as_numpy(regions["foreign_vectors"], np.float32, shape)
        return vectors.tolist()
    finally:
        for region in regions.values():
            shared_memory.destroy_shared_memory_region(region)


@call("tritonclient", "completion")
def tritonclient_stream(at: Addresses) -> Any:
    return _stream(at, "gpt2", PROMPT, **_GREEDY)


@call("tritonclient", "translation")
def tritonclient_translation(at: Addresses) -> Any:
    return _stream(at, "dates", DATE)


def _stream(at: Addresses, model: str, text: str, **parameters: Any) -> str:
    """Return the text of an answer that may come in parts."""
    import numpy as np
    from tritonclient import grpc

    parts: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(at.grpc) as client:
        client.start_stream(lambda result, error: parts.put(error or result))
        prompt = _input(grpc, "text_input", np.array([text.encode()], dtype=object))
        flag = grpc.InferInput("stream", [1], "BOOL")
        flag.set_data_from_numpy(np.array([True]))
        client.async_stream_infer(
            model, [prompt, flag], parameters=parameters, enable_empty_final_response=True
        )
        found = b""
        while True:
            part = parts.get(timeout=_TIMEOUT_SECONDS)
            if isinstance(part, Exception):
                raise part
            output = part.as_numpy("text_output")
            found += b"" if output is None else output.ravel()[0]
            if part.get_response().parameters["triton_final_response"].bool_param:
                return found.decode()


@call("kserve", "vectors")
async def kserve_rest(at: Addresses) -> Any:
    from kserve import InferenceRESTClient, RESTConfig

    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=_TIMEOUT_SECONDS))
    answer = await client.infer(f"http://{at.http}", _kserve_request(), model_name="minilm")
    return _kserve_vectors(answer)


@call("kserve", "vectors")
async def kserve_grpc(at: Addresses) -> Any:
    from kserve import InferenceGRPCClient

    client = InferenceGRPCClient(at.grpc, timeout=_TIMEOUT_SECONDS)
    return _kserve_vectors(await client.infer(_kserve_request()))


def _kserve_request() -> Any:
    from kserve import InferInput, InferRequest

    return InferRequest("minilm", [InferInput("text", [len(TEXTS), 1], "BYTES", data=TEXTS)])


def _kserve_vectors(answer: Any) -> Any:
    output = next(each for each in answer.outputs if each.name == _OUTPUT)
    return output.as_numpy().reshape(output.shape).tolist()


@call("nvidia-pytriton", "vectors")
def pytriton_http(at: Addresses) -> Any:
    from pytriton.client import ModelClient

    with ModelClient(f"http://{at.http}", "minilm") as client:
        return client.infer_batch(text=_column(TEXTS))[_OUTPUT].tolist()


@call("nvidia-pytriton", "vectors")
def pytriton_grpc(at: Addresses) -> Any:
    from pytriton.client import ModelClient

    with ModelClient(f"grpc://{at.grpc}", "minilm") as client:
        return [client.infer_sample(text=row)[_OUTPUT].tolist() for row in _column(TEXTS)]


# it drops a response that is marked as the last one, whatever is in it
@call("nvidia-pytriton", "completion without its last part")
def pytriton_decoupled(at: Addresses) -> Any:
    import numpy as np
    from pytriton.client import DecoupledModelClient

    with DecoupledModelClient(f"grpc://{at.grpc}", "gpt2") as client:
        # it takes no parameters of requests
        options = json.dumps(_GREEDY)
        parts = client.infer_sample(
            text_input=_column([PROMPT])[0],
            sampling_parameters=_column([options])[0],
            stream=np.array([True]),
        )
        return b"".join(part["text_output"].ravel()[0] for part in parts).decode()


@call("tritony", "vectors")
def tritony_grpc(at: Addresses) -> Any:
    return _tritony(at.grpc, "grpc")


@call("tritony", "vectors")
def tritony_http(at: Addresses) -> Any:
    return _tritony(at.http, "http")


def _tritony(address: str, protocol: str) -> Any:
    from tritony import InferenceClient

    client = InferenceClient.create_with("minilm", address, protocol=protocol)
    # its 30 seconds go into a field of microseconds; the setting `ignore_request_timeout` helps too
    client.client_timeout = 1_000_000 * _TIMEOUT_SECONDS
    # one array for each output of the configuration
    vectors, _ = client({"text": _column(TEXTS)})
    return vectors.tolist()


@call("litellm", "vectors")
def litellm_triton_embeddings(at: Addresses) -> Any:
    from litellm import embedding

    # of the gateway: the server has no input of the name that litellm sends
    address = f"{at.gateway['minilm']}/v2/models/minilm/infer"
    answer = embedding("triton/minilm", input=TEXTS, api_base=address)
    return [each["embedding"] for each in answer.data]


@call("litellm", "prompt and completion")
def litellm_triton_generate(at: Addresses) -> Any:
    from litellm import completion

    answer = completion(
        "triton/gpt2",
        messages=[{"role": "user", "content": PROMPT}],
        api_base=f"http://{at.http}/v2/models/gpt2/generate",
        max_tokens=MAX_TOKENS,
        # litellm passes on only what it knows, unless told
        top_k=1,
    )
    return answer.choices[0].message.content


# as tensors of the TensorRT-LLM backend
_OPTIONS_AS_INPUTS = "unexpected inference input"


@call("llama-index-llms-nvidia-triton", "completion", refused=_OPTIONS_AS_INPUTS)
def llama_index_triton(at: Addresses) -> Any:
    from llama_index.llms.nvidia_triton import NvidiaTriton

    return str(
        NvidiaTriton(server_url=at.grpc, model_name="gpt2", tokens=MAX_TOKENS).complete(PROMPT)
    )
