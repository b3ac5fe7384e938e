"""Requests of frontends with a server in their process, as their sources form them.

Triton's OpenAI frontend, with `--backend vllm` and without, and Dynamo's Triton worker. Neither is installed: both
need the server as a library. Their tensors go over gRPC instead, and answers are read as the frontends read them.
Sources: python/openai/openai_frontend/engine of triton-inference-server/server, of 2026, and
examples/backends/tritonserver/src/tritonworker.py of ai-dynamo/dynamo.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Mapping
from typing import Any

from .table import MAX_TOKENS, PROMPT, TEXTS, TOOL_SCHEMA, Addresses, call

_TIMEOUT_SECONDS = 60
# What the frontend's schema fills in; fields that are null are left out.
_DEFAULTS: dict[str, Any] = {
    "frequency_penalty": 0,
    "ignore_eos": False,
    "n": 1,
    "presence_penalty": 0,
    "temperature": 1,
    "top_p": 1,
}
# Fields of vLLM's StructuredOutputsParams.
_NO_STRUCTURE: dict[str, Any] = {
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}


@call("tritonclient", "completion and usage")
def openai_frontend_completion(at: Addresses) -> Any:
    return _whole(at, _vllm_form(PROMPT, temperature=0))


@call("tritonclient", "completion and usage")
def openai_frontend_streamed_completion(at: Addresses) -> Any:
    return _parts(at, _vllm_form(PROMPT, stream=True, temperature=0))


@call("tritonclient", "prompt and completion")
def openai_frontend_echo(at: Addresses) -> Any:
    text, _, _ = _whole(at, _vllm_form(PROMPT, echo=True, temperature=0))
    return text


# releases up to 2025 sent these options too, and no `return_logprobs`
@call("tritonclient", "completion and usage")
def openai_frontend_completion_of_2025(at: Addresses) -> Any:
    form = _vllm_form(PROMPT, temperature=0, best_of=1, logprobs=False)
    return _whole(at, {name: form[name] for name in form if name != "return_logprobs"})


# the frontend applies the chat template itself, with the tokenizer of its option `--tokenizer`
@call("tritonclient", "chat")
def openai_frontend_streamed_chat(at: Addresses) -> Any:
    text, _, _ = _parts(at, _vllm_form(f"{PROMPT} ", stream=True, temperature=0))
    return text


@call("tritonclient", "tool")
def openai_frontend_named_tool(at: Addresses) -> Any:
    structure = json.dumps(_NO_STRUCTURE | {"json": json.dumps(TOOL_SCHEMA)})
    most = 60
    # the model is trained on each machine, and may repeat spaces, which the grammar allows, until it is cut
    for seed in range(20):
        form = _vllm_form(
            f"{PROMPT} ",
            structured_outputs=structure,
            max_tokens=most,
            seed=seed,
            frequency_penalty=2.0,
        )
        text, _, num_tokens = _whole(at, form)
        if num_tokens < most:
            return json.loads(text)
    raise AssertionError(f"no answer has fewer than {most} tokens; the last one is {text!r}")


@call("tritonclient", "completion", refused="unexpected shape for input")
def openai_frontend_without_backend_option(at: Addresses) -> Any:
    form: dict[str, Any] = {
        "text_input": [[PROMPT]],
        "stream": [[False]],
        "return_num_input_tokens": [[True]],
        "return_num_output_tokens": [[True]],
    }
    return _whole(at, form)


@call("tritonclient", "vectors", refused="unexpected inference input")
def openai_frontend_embedding(at: Addresses) -> Any:
    asked = json.dumps({"input": TEXTS[0], "pooling_params": {}})
    form = {
        "embedding_request": [asked],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }
    return _whole(at, form, "minilm")


@call("tritonclient", "vectors")
def dynamo_worker_token_ids(at: Addresses) -> Any:
    from tokenizers import Tokenizer
    from tritonclient import grpc

    tokenizer = Tokenizer.from_file(f"{at.folders['minilm']}/tokenizer.json")
    tokenizer.no_padding()
    with grpc.InferenceServerClient(at.grpc) as client:
        # the worker sends each response's outputs of this list, as numbers
        outputs = [each.name for each in client.get_model_metadata("minilm").outputs]
        vectors = []
        for text in TEXTS:
            ids = grpc.InferInput("input_ids", [1, len(tokenizer.encode(text).ids)], "INT64")
            ids.set_data_from_numpy(_array([tokenizer.encode(text).ids], "int64"))
            answer = client.infer("minilm", [ids])
            found = {name: answer.as_numpy(name) for name in outputs}
            assert all(each is not None and each.dtype != object for each in found.values())
            vectors += found["sentence_embedding"].tolist()
    return vectors


def _vllm_form(
    prompt: str, *, stream: bool = False, echo: bool = False, **sampling: Any
) -> dict[str, Any]:
    """Return the tensors of a request in the form of NVIDIA's vLLM backend."""
    options = _DEFAULTS | {"max_tokens": MAX_TOKENS} | sampling
    return {
        "return_logprobs": [False],
        "text_input": [prompt],
        "stream": [stream],
        "exclude_input_in_output": [not echo],
        "sampling_parameters": [json.dumps(options)],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }


def _whole(at: Addresses, form: Mapping[str, Any], model: str = "gpt2") -> Any:
    """Return the text of an answer in one response, and its numbers of tokens."""
    responses = list(_responses(at, form, model))
    assert 1 <= len(responses) <= 2
    return _text(responses[0]), *_usage(responses[0])


def _parts(at: Addresses, form: Mapping[str, Any]) -> Any:
    """Return the joined text of a streamed answer, and its numbers of tokens."""
    responses = list(_responses(at, form, "gpt2"))
    assert len(responses) > 1
    usages = [_usage(each) for each in responses]
    text = "".join(_text(each) for each in responses)
    return text, usages[0][0], sum(completion for _, completion in usages)


def _responses(at: Addresses, form: Mapping[str, Any], model: str) -> Iterator[Any]:
    """Return the responses up to the one that the server marks as final."""
    from tritonclient import grpc

    got: queue.Queue[Any] = queue.Queue()
    inputs = [_input(grpc, name, values) for name, values in form.items()]
    with grpc.InferenceServerClient(at.grpc) as client:
        client.start_stream(lambda result, error: got.put(error or result))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        is_final = False
        while not is_final:
            response = got.get(timeout=_TIMEOUT_SECONDS)
            if isinstance(response, Exception):
                raise response
            is_final = response.get_response().parameters["triton_final_response"].bool_param
            yield response


def _input(library: Any, name: str, values: list[Any]) -> Any:
    flat = values[0] if isinstance(values[0], list) else values
    kind = ("bool", "BOOL") if isinstance(flat[0], bool) else ("object", "BYTES")
    array = _array(values, kind[0])
    found = library.InferInput(name, list(array.shape), kind[1])
    found.set_data_from_numpy(array)
    return found


def _array(values: list[Any], dtype: str) -> Any:
    import numpy as np

    return np.array(values, dtype=dtype)


def _text(response: Any) -> str:
    """Return the only string of a response, or no text if it has none."""
    output = response.as_numpy("text_output")
    if output is None:
        return ""
    assert output.size == 1
    return str(output.ravel()[0].decode())


def _usage(response: Any) -> tuple[int, int]:
    """Return the numbers of tokens of the prompt and of a response."""
    counts = [response.as_numpy(f"num_{kind}_tokens") for kind in ("input", "output")]
    assert all(str(count.dtype) in ("uint32", "int32") for count in counts)
    prompt, completion = (int(count.ravel()[0]) for count in counts)
    return prompt, completion
