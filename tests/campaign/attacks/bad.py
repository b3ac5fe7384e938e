"""Requests of known faults: each must be refused as the client's fault, with its reason."""

import json
import random
from collections.abc import Mapping
from typing import Any

from tests.server.bad_requests import CASES, OURS
from tests.server.clients import AnswerError
from tests.server.serving import http_call

from ..endings import TIMEOUT_SECONDS, Ending
from ..models import DECODER, ENCODER, TRANSLATOR
from ..target import Target

# Bodies of /generate, with a word of the reason.
_BAD_PROMPTS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"text_input": "a", "max_tokens": 0}, "max_tokens"),
    ({"text_input": "a", "temperature": -1}, "temperature"),
    ({"text_input": "a", "top_p": 7.5}, "top_p"),
    ({"text_input": "a", "seed": "many"}, "seed"),
    ({"text_input": "a", "num_beams": 10**6}, "num_beams"),
    ({"text_input": "a", "n": -3}, "n is -3"),
    ({"text_input": "a", "max_tokenz": 5}, "max_tokenz"),
    ({"text_input": "a", "deadline_ms": -5}, "deadline_ms"),
    ({"text_input": "a", "request_priority": 10}, "request_priority"),
    ({"text_input": "a", "sampling_parameters": "[1]"}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": "[" * 5000}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": '{"stop": 5}'}, "stop"),
    ({"text_input": "a", "sampling_parameters": '{"logit_bias": {"x": 1}}'}, "logit_bias"),
    ({"text_input": "a", "sampling_parameters": '{"unknown": 1}'}, "unknown"),
    ({"text_input": "a", "guided_decoding": '{"json": "{"}'}, "guided_decoding"),
    ({"text_input": "a", "messages": "[]"}, "messages"),
    ({"messages": "{"}, "messages"),
    ({"text_input": "word " * 20_000}, "bytes"),
    ({"input_ids": [-1]}, "-1"),
    ({"input_ids": [2**40]}, "1099511627776"),
    ({"input_ids": [5] * 5000}, "5000"),
)


def bad_embed(draw: random.Random, target: Target) -> Ending:
    """Tensors and parameters that an encoder refuses."""
    case = draw.choice(CASES)
    client = draw.choice((target.grpc, target.http))
    try:
        client.infer(ENCODER, case.inputs, case.parameters, TIMEOUT_SECONDS)
    except AnswerError as error:
        return _refusal(
            ENCODER,
            error.code,
            error.message,
            case.word,
            is_ours=case in OURS,
            what=case.description,
        )
    return Ending("wrong", ENCODER, message=f"answered: {case.description}")


def bad_generate(draw: random.Random, target: Target) -> Ending:
    """Prompts and options that a decoder or a translator refuses."""
    body, word = draw.choice(_BAD_PROMPTS)
    model = draw.choice((DECODER, TRANSLATOR))
    status, answer = http_call(target.server, "POST", f"/v2/models/{model}/generate", body)
    what = json.dumps(body)[:100]
    if status == 200:
        return Ending("wrong", model, message=f"answered: {what}")
    code = "INVALID_ARGUMENT" if status == 400 else str(status)
    return _refusal(model, code, answer["error"], word, is_ours=True, what=what)


def _refusal(model: str, code: str, message: str, word: str, *, is_ours: bool, what: str) -> Ending:
    if code == "DEADLINE_EXCEEDED":
        return Ending("lost", model, code, f"{what}: {message}")
    if code != "INVALID_ARGUMENT" or word not in message:
        return Ending("wrong", model, code, f"{what}: {message}")
    return Ending("refused", model, code, message, is_ours=is_ours)
