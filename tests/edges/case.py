"""Edge cases of requests: a route, a body, the right answer and its source.

A case names a role, such as `embedder`, in place of a model. Two tests run the table:
`tests/client/gateway/test_edges.py` on a gateway over fake models, which have no weights, and
`tests/server/test_edges.py` on a gateway before the real server. A module of this folder has the cases of one topic;
`EDGES` in `table.py` has all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

# Differs between two answers to one body.
_VOLATILE = frozenset({"id", "created", "request_id"})
# Tolerance of fp32 values that two batches compute.
RELATIVE, ABSOLUTE = 1e-4, 1e-6


@dataclass(frozen=True, slots=True)
class Same:
    """Right is the answer to another body, which is no edge case.

    Attributes:
        body: other body.
        route: its route; None is the route of the case.
        without: names of fields that may differ, such as `usage`.
    """

    body: Mapping[str, Any]
    route: str | None = None
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Gives:
    """Right is an answer with these values; an object may have other fields too."""

    part: Any


@dataclass(frozen=True, slots=True)
class Holds:
    """Right is an answer for which `check` does not raise.

    Attributes:
        check: function of the JSON, or of the list of events of a stream.
    """

    check: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Refused:
    """Right is a refusal with this status, whose text has these words."""

    status: int
    words: tuple[str, ...]


Right: TypeAlias = Same | Gives | Holds | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One edge case.

    Attributes:
        name: sentence that says what is right; the id of the test.
        route: path of the request.
        body: JSON of the request.
        right: right answer.
        source: whose answer that is: a project with its version, a paper, or a formula.
        role: model of the request: embedder (MiniLM), ranker, classifier, sparse, tokens, states, tagger or writer
            (GPT-2).
        needs_weights: whether fake models have no such answer.
        headers: headers of the request.
    """

    name: str
    route: str
    body: Mapping[str, Any]
    right: Right
    source: str
    role: str = "embedder"
    needs_weights: bool = False
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and text of a response."""

    status: int
    text: str

    def value(self) -> Any:
        """Return the JSON of an answer, or the list of events of a stream."""
        if self.text.startswith("data:"):
            events = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
            return [json.loads(event) for event in events if event != "[DONE]"]
        return json.loads(self.text)


# Answers a body that is sent to a route, of the model with a role.
Ask: TypeAlias = Callable[[str, Mapping[str, Any], str, Mapping[str, str] | None], Answer]


def check(edge: Edge, ask: Ask) -> None:
    """Raise AssertionError unless the answer to a case is right."""
    answer = ask(edge.route, edge.body, edge.role, edge.headers)
    if isinstance(edge.right, Refused):
        assert answer.status == edge.right.status, answer.text[:2000]
        for words in edge.right.words:
            assert words in answer.text
        return
    assert answer.status == 200, answer.text[:2000]
    if isinstance(edge.right, Holds):
        edge.right.check(answer.value())
    elif isinstance(edge.right, Gives):
        assert_part(answer.value(), edge.right.part)
    else:
        plain = ask(edge.right.route or edge.route, edge.right.body, edge.role, edge.headers)
        assert plain.status == 200, plain.text[:2000]
        ignored = _VOLATILE | edge.right.without
        assert_part(_without(answer.value(), ignored), _without(plain.value(), ignored))


def assert_part(found: Any, part: Any, path: str = "answer") -> None:
    """Raise AssertionError unless `found` has the values of `part`, numbers up to rounding."""
    if isinstance(part, Mapping):
        assert isinstance(found, Mapping), f"{path} is {found!r}"
        for name, value in part.items():
            assert name in found, f"{path} has no {name}: {sorted(found)}"
            assert_part(found[name], value, f"{path}.{name}")
    elif isinstance(part, list):
        assert isinstance(found, list), f"{path} is {found!r}"
        assert len(found) == len(part), f"{path} has {len(found)} values, right: {len(part)}"
        for index, value in enumerate(part):
            assert_part(found[index], value, f"{path}.{index}")
    elif isinstance(part, float):
        is_close = math.isclose(found, part, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        assert is_close, f"{path} is {found!r}, right: {part!r}"
    else:
        assert found == part, f"{path} is {found!r}, right: {part!r}"


def _without(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _without(each, names) for name, each in value.items() if name not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else value
