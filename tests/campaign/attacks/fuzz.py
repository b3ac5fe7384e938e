"""Mutated requests: JSON, binary tensors, gRPC messages. Any answer will do.

Three known faults of the front end of server 2.51 are left alone: chunked bodies, shared memory calls, and shapes of
JSON tensors, for which it allocates memory before it looks at the data, and ends if there is not as much.
"""

import copy
import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.server.clients import http_request, integers, texts
from varlen_tools.local_server import LOOPBACK

from ..endings import TIMEOUT_SECONDS, Ending
from ..models import DECODER, ENCODER, TRANSLATOR
from ..target import Target

_STRINGS = ("", "\0", "a" * 5000, "../../etc", "\ud800", "é" * 50, "NaN", "%s%n", "true", "[", "{}")
_NUMBERS = (-1, 0, 1, 64, 65, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64, 1e308, -0.0, 0.5, 1e-320)
_JUNK: tuple[Any, ...] = (None, True, [], {}, [[]], [None], [[[[]]]], {"a": {"b": []}}, [1, "a"])
# The server reads these fields of its protocol itself; `parameters` of a request reach the backend.
_NAMES = (
    "truncate", "normalize", "request_priority", "deadline_ms", "timeout", "priority", "dimensions",
    "output_dtype", "prompt_name", "max_tokens", "temperature", "n", "stop", "seed", "num_beams", "x",
)  # fmt: skip
# Size of each of two dimensions: megabytes together, of any data type.
_LARGEST_SHAPE = 1 << 10
_METHODS = ("ModelInfer", "ModelStreamInfer")


def fuzz_json(draw: random.Random, target: Target) -> Ending:
    """A JSON request with values, names or bytes changed."""
    model, path, body = draw.choice(_json_requests())
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        change_value(draw, body)
    _limit_shapes(body)
    data = json.dumps(body).encode()
    if draw.random() < 0.4:
        data = changed_bytes(draw, data)
    return _post(target, model, path, data, {})


def fuzz_parameters(draw: random.Random, target: Target) -> Ending:
    """A request with parameters of any names and values."""
    model, path, body = draw.choice(_json_requests())
    chosen = {draw.choice(_NAMES): _junk(draw) for _ in range(draw.randint(1, 4))}
    if path.endswith("infer"):
        body = {**body, "parameters": chosen}
    elif draw.random() < 0.5:
        body = {**chosen, **body}
    else:
        body = {**body, "sampling_parameters": json.dumps(chosen)}
    return _post(target, model, path, json.dumps(body).encode(), {})


def fuzz_binary(draw: random.Random, target: Target) -> Ending:
    """Binary tensors over HTTP with bytes, sizes or lengths changed."""
    inputs = draw.choice((texts("hello", "a longer text"), {"input_ids": integers([[101, 7592]])}))
    path, body, headers = http_request(ENCODER, inputs, {})
    name = "Inference-Header-Content-Length"
    head = int(headers[name])
    choice = draw.randrange(4)
    if choice == 0:
        wrong = (0, 1, head - 1, head + 1, len(body), len(body) + 1, -1, 2**31, 2**63, "x", "")
        headers = {name: str(draw.choice(wrong))}
    elif choice == 1:
        body = body[:head] + changed_bytes(draw, body[head:])
    elif choice == 2:
        sizes = (-1, 0, 1, 2**31, 2**62, len(body))
        changed = json.loads(body[:head])
        changed["inputs"][0]["parameters"]["binary_data_size"] = draw.choice(sizes)
        changed_head = json.dumps(changed).encode()
        body, headers = changed_head + body[head:], {name: str(len(changed_head))}
    else:
        body = changed_bytes(draw, body)
    # the server hangs up on heads that it cannot read
    return _post(target, ENCODER, path, body, headers, may_hang_up=choice == 0)


def fuzz_grpc(draw: random.Random, target: Target) -> Ending:
    """A gRPC message with fields or bytes changed, single or in a stream."""
    request = service_pb2.ModelInferRequest(model_name=draw.choice((ENCODER, DECODER, TRANSLATOR)))
    model = request.model_name
    names = ("text", "input_ids") if model == ENCODER else ("text_input", "input_ids", "stream")
    for name in draw.sample(names, draw.randint(0, 2)):
        shape = draw.choice(([1], [1, 1], [0], [2, 3], [-1], [2**40, 2**40], [1] * 9, []))
        datatype = draw.choice(("BYTES", "INT64", "BOOL", "FP32", "", "BYTES2"))
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        if draw.random() < 0.9:
            size = draw.choice((0, 1, 4, 8, 9, 48))
            request.raw_input_contents.append(draw.randbytes(size))
    for _ in range(draw.randint(0, 2)):
        request.parameters[draw.choice(_NAMES)].string_param = draw.choice(_STRINGS[:2])
    data = request.SerializeToString()
    if draw.random() < 0.5:
        data = changed_bytes(draw, data)
    method = draw.choice(_METHODS)
    return _call_raw(target, method, data, model if method == "ModelInfer" else "")


def _call_raw(target: Target, method: str, data: bytes, model: str) -> Ending:
    path = f"/inference.GRPCInferenceService/{method}"
    try:
        if method == "ModelInfer":
            target.channel.unary_unary(path)(data, timeout=TIMEOUT_SECONDS)
            return Ending("answered")
        answers = list(target.channel.stream_stream(path)(iter([data]), timeout=TIMEOUT_SECONDS))
    except grpc.RpcError as error:
        code, details = error.code().name, error.details() or ""
        if code == "DEADLINE_EXCEEDED":
            return Ending("lost", "", code, details)
        if code == "UNAVAILABLE":
            return Ending("wrong", "", code, details)
        return Ending("refused", "", code, details)
    errors = [
        service_pb2.ModelStreamInferResponse.FromString(each).error_message for each in answers
    ]
    message = " ".join(filter(None, errors))
    return Ending("refused", "", "STREAM", message) if message else Ending("answered")


def _post(
    target: Target,
    model: str,
    path: str,
    data: bytes,
    headers: dict[str, str],
    *,
    may_hang_up: bool = False,
) -> Ending:
    connection = http.client.HTTPConnection(
        LOOPBACK, target.server.http_port, timeout=TIMEOUT_SECONDS
    )
    try:
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        content = response.read()
    except TimeoutError:
        return Ending("lost", "", message=f"no answer to {data[:300]!r}")
    except (OSError, http.client.HTTPException) as error:
        return Ending("refused" if may_hang_up else "wrong", "", "HUNG_UP", repr(error))
    finally:
        connection.close()
    text = content.decode(errors="replace")
    if response.status == 200 and '"error"' not in text:
        return Ending("answered")
    if response.status >= 500 and response.status not in (500, 503):
        return Ending("wrong", "", str(response.status), text)
    # what the request itself holds is no leak
    repeated = "/" in data.decode(errors="replace")
    return Ending("refused", "", str(response.status), "" if repeated else text)


def _json_requests() -> list[tuple[str, str, dict[str, Any]]]:
    """Return model, path and body of valid requests."""
    text = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [[101, 7592, 102]]}
    prompt = {"text_input": "def", "max_tokens": 4, "stream": False, "return_logprobs": True}
    found: list[tuple[str, str, dict[str, Any]]] = [
        (ENCODER, "infer", {"inputs": [each], "parameters": {"truncate": True}, "id": "1"})
        for each in (text, ids)
    ]
    for model in (DECODER, TRANSLATOR):
        found += [
            (model, "generate", prompt),
            (model, "generate_stream", {**prompt, "stream": True}),
        ]
    return [(model, f"/v2/models/{model}/{end}", body) for model, end, body in found]


def _limit_shapes(body: dict[str, Any]) -> None:
    """Bound the numbers in shapes of a JSON request, wherever values were changed."""
    for holder, key in list(_places(body)):
        if key == "shape" and isinstance(holder[key], list):
            holder[key] = [
                min(each, _LARGEST_SHAPE) if isinstance(each, int) else each for each in holder[key]
            ]


def change_value(draw: random.Random, body: Any) -> None:
    """Replace, remove or add a value somewhere in a JSON value."""
    places = list(_places(body))
    if not places:
        return
    holder, key = draw.choice(places)
    choice = draw.random()
    if choice < 0.15:
        del holder[key]
    elif choice < 0.3 and isinstance(holder, dict):
        holder[draw.choice(_STRINGS)] = _junk(draw)
    else:
        holder[key] = _junk(draw)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return every container in a JSON value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys:
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def _junk(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice((*_JUNK, draw.choice(_STRINGS), draw.choice(_NUMBERS))))


def changed_bytes(draw: random.Random, data: bytes) -> bytes:
    """Return bytes with a part cut, repeated, inserted or replaced."""
    if not data:
        return draw.randbytes(3)
    at = draw.randrange(len(data))
    size = draw.choice((1, 2, 8, 100))
    change = draw.randrange(5)
    if change == 0:
        return data[:at]
    if change == 1:
        return data[:at] + data[at + size :]
    if change == 2:
        return data[:at] + data[at : at + size] + data[at:]
    if change == 3:
        return data[:at] + draw.randbytes(size) + data[at:]
    return data[:at] + draw.randbytes(size) + data[at + size :]
