"""Small requests that ask for much work: grammars, chat templates, large JSON, many samples.

Each is served, with its constraint kept, or refused with its reason.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.server.serving import http_call

from ..endings import Ending
from ..models import CHAT, DECODER
from ..target import Target
from .constrained import constrained_answer


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


def costly_grammar(draw: random.Random, target: Target) -> Ending:
    """A grammar that may take any time and memory."""
    return constrained_answer(draw, target, draw.choice(_COSTLY)(draw))


def costly_template(draw: random.Random, target: Target) -> Ending:
    """Messages with which the model's template takes too long, or too much memory."""
    count = draw.randint(600, 1000)
    messages = [{"role": "user", "content": "a"}] * count
    return _refused(target, CHAT, {"messages": json.dumps(messages)}, "takes more than")


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


def _refused(target: Target, model: str, body: Mapping[str, Any], word: str) -> Ending:
    status, answer = http_call(target.server, "POST", f"/v2/models/{model}/generate", body)
    if status == 400 and word in answer["error"]:
        return Ending("refused", model, "INVALID_ARGUMENT", answer["error"], is_ours=True)
    return Ending("wrong", model, str(status), f"not refused for {word}: {str(answer)[:300]}")
