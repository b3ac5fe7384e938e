"""Small requests that ask for much work: grammars, chat templates, large JSON, many samples.

Each is served, with its constraint kept, or refused with its reason.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema

from tests.server.serving import http_call

from ..endings import Ending
from ..models import CHAT, DECODER
from ..target import Target
from .constraints import random_regex, random_schema

_TOKENS = 48


def _all_of(kind: str, schemas: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {"json": {"type": kind, "allOf": [*schemas]}}


# Grammars that are refused, or served in the time of a sandbox.
_COSTLY: tuple[Callable[[random.Random], Mapping[str, Any]], ...] = (
    lambda _: {"json": {"$ref": "#"}},
    lambda _: {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    lambda draw: _all_of("integer", ({"multipleOf": 7919}, {"multipleOf": 9973 + 2 * draw.randrange(99)})),
    lambda draw: _all_of("string", [{"pattern": f"{each}{{{draw.randint(5, 9)}}}"} for each in "abcdefghijkl"]),
    lambda draw: {"regex": f".*[a-m].{{{draw.randint(2000, 5000)}}}y"},
    lambda draw: {"regex": "a*" * draw.randint(2000, 4900)},
    lambda draw: {"regex": f"(a{{ {draw.randint(100, 400)} }}){{ 300 }}"},
    lambda draw: {"regex": f"(a{{0000000001000}}){{ {draw.randint(500, 1000)} }}"},
    lambda draw: {"choice": ["".join(draw.choices("ab \n", k=draw.randint(10_000, 60_000)))]},
)  # fmt: skip
_REFUSALS = ("structured_outputs cannot be served", "structured_outputs has", "try again later")


def constrained(draw: random.Random, target: Target) -> Ending:
    """A random regular expression or schema, which a whole answer matches."""
    if draw.random() < 0.5:
        regex = random_regex(draw)
        return _constrained(
            draw, target, {"regex": regex}, lambda text: bool(re.fullmatch(regex, text))
        )
    schema = random_schema(draw)
    return _constrained(draw, target, {"json": schema}, lambda text: _is_valid(text, schema))


def costly_grammar(draw: random.Random, target: Target) -> Ending:
    """A grammar that may take any time and memory."""
    return _constrained(draw, target, draw.choice(_COSTLY)(draw))


def costly_template(draw: random.Random, target: Target) -> Ending:
    """Messages with which the template of the model takes too long."""
    count = draw.randint(600, 1000)
    messages = [{"role": "user", "content": "a"}] * count
    return _refused(target, CHAT, {"messages": json.dumps(messages)}, "processor time")


def large_json(draw: random.Random, target: Target) -> Ending:
    """Options or messages of many megabytes."""
    count = draw.randint(500_000, 2_000_000)
    if draw.random() < 0.5:
        options = '{"stop": [' + ",".join(['"a"'] * count) + "]}"
        body = {"text_input": "a", "sampling_parameters": options}
        return _refused(target, DECODER, body, "sampling_parameters has")
    return _refused(target, CHAT, {"messages": "[" + ",".join(["[]"] * count) + "]"}, "messages")


def many_samples(draw: random.Random, target: Target) -> Ending:
    """Many long samples of one tenant, which are all served."""
    count = draw.randint(16, 64)
    body = {
        "text_input": "def run(self):",
        "n": count,
        "max_tokens": draw.randint(30, 100),
        "logprobs": 20,
        "ignore_eos": True,
        "tenant": "large",
        "exclude_input_in_output": True,
    }
    status, answer = http_call(target.server, "POST", f"/v2/models/{DECODER}/generate", body)
    if status == 200 and len(answer["text_output"]) == count:
        return Ending("right", DECODER)
    return Ending("wrong", DECODER, str(status), str(answer)[:300])


def _constrained(
    draw: random.Random,
    target: Target,
    constraint: Mapping[str, Any],
    holds: Callable[[str], bool] | None = None,
) -> Ending:
    """Ask for an answer that matches; `holds` checks one that has ended by itself."""
    body = {
        "text_input": "x",
        "max_tokens": _TOKENS,
        "temperature": draw.choice((0, 1.0)),
        "seed": draw.randrange(2**31),
        "sampling_parameters": json.dumps({"structured_outputs": constraint}),
        "exclude_input_in_output": True,
        "return_finish_reason": True,
    }
    status, answer = http_call(target.server, "POST", f"/v2/models/{DECODER}/generate", body)
    what = json.dumps(constraint)[:200]
    if status == 200:
        if holds is None or answer["finish_reason"] != "stop":
            return Ending("answered", DECODER)
        if holds(answer["text_output"]):
            return Ending("right", DECODER)
        return Ending("wrong", DECODER, message=f"{what}: answered {answer['text_output']!r}")
    message = answer["error"]
    if status in (400, 503) and any(text in message for text in _REFUSALS):
        code = "INVALID_ARGUMENT" if status == 400 else "UNAVAILABLE"
        return Ending("refused", DECODER, code, message, is_ours=True)
    return Ending("wrong", DECODER, str(status), f"{what}: {message}")


def _refused(target: Target, model: str, body: Mapping[str, Any], word: str) -> Ending:
    status, answer = http_call(target.server, "POST", f"/v2/models/{model}/generate", body)
    if status == 400 and word in answer["error"]:
        return Ending("refused", model, "INVALID_ARGUMENT", answer["error"], is_ours=True)
    return Ending("wrong", model, str(status), f"not refused for {word}: {str(answer)[:300]}")


def _is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
