"""Requests with a grammar: a whole answer must match it for `re` or `jsonschema`."""

import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from threading import Lock
from typing import Any

from tests.server.serving import http_call

from ..endings import Ending
from ..models import DECODER
from ..target import Target
from .constraints import random_regex, random_schema
from .oracle import Oracle

_TOKENS = 48
# Added to the logit of the end token: an answer ends at once where it may, soon, or by itself.
_END_TOKEN, _END_BIASES = "0", (100, 5, 0)
_CANNOT = "structured_outputs cannot be served: "
_REFUSALS = (_CANNOT, "structured_outputs has", "try again later")
_REASON_CHARACTERS = 60


class FuzzedConstraints:
    """Random regular expressions and schemas. Any thread may send them.

    Attributes:
        refusals: number of refused constraints, by reason without its numbers.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._oracle = Oracle()
        self._sent: set[str] = set()
        self.refusals: Counter[str] = Counter()

    @property
    def num_distinct(self) -> int:
        """Number of different constraints that were sent."""
        return len(self._sent)

    def constrained_regex(self, draw: random.Random, target: Target) -> Ending:
        """A random regular expression."""
        return self._answer(draw, target, {"regex": random_regex(draw)})

    def constrained_schema(self, draw: random.Random, target: Target) -> Ending:
        """A random JSON schema."""
        return self._answer(draw, target, {"json": random_schema(draw)})

    def _answer(self, draw: random.Random, target: Target, constraint: Mapping[str, Any]) -> Ending:
        ending = constrained_answer(draw, target, constraint, self._oracle)
        with self._lock:
            self._sent.add(json.dumps(constraint, sort_keys=True))
            if ending.end == "refused":
                self.refusals[_reason(ending.message)] += 1
        return ending


def constrained_answer(
    draw: random.Random,
    target: Target,
    constraint: Mapping[str, Any],
    oracle: Oracle | None = None,
) -> Ending:
    """Ask for an answer that matches a constraint, or for a refusal with its reason.

    Args:
        draw: chooses the options of the request.
        target: the server.
        constraint: value of `structured_outputs`.
        oracle: checks an answer that has ended by itself; None checks nothing.
    """
    options = {
        "structured_outputs": constraint,
        "logit_bias": {_END_TOKEN: draw.choice(_END_BIASES)},
    }
    body = {
        "text_input": "x",
        "max_tokens": _TOKENS,
        "temperature": draw.choice((0, 1.0)),
        "seed": draw.randrange(2**31),
        "sampling_parameters": json.dumps(options),
        "exclude_input_in_output": True,
        "return_finish_reason": True,
    }
    status, answer = http_call(target.server, "POST", f"/v2/models/{DECODER}/generate", body)
    what = json.dumps(constraint)[:200]
    if status == 200:
        if oracle is None or answer["finish_reason"] != "stop":
            return Ending("answered", DECODER)
        holds = oracle.holds(constraint, answer["text_output"])
        if holds is None:
            return Ending("answered", DECODER)
        if holds:
            return Ending("right", DECODER)
        return Ending("wrong", DECODER, message=f"{what}: answered {answer['text_output']!r}")
    message = answer["error"]
    if status in (400, 503) and any(text in message for text in _REFUSALS):
        code = "INVALID_ARGUMENT" if status == 400 else "UNAVAILABLE"
        return Ending("refused", DECODER, code, message, is_ours=True)
    return Ending("wrong", DECODER, str(status), f"{what}: {message}")


def _reason(message: str) -> str:
    """Return the reason of a refusal without the numbers and values of its request."""
    reason = message.partition(_CANNOT)[2] or message
    return re.sub(r"[\d.]+|[;,\"'].*", " ", reason)[:_REASON_CHARACTERS].strip()
