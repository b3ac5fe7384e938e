"""The table of calls: which foreign client makes them, and which answer it must get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

# What all calls send, so that one right answer serves many clients.
TEXTS = ["the cat sleeps", "a river runs to the sea", "one two three four five"]
QUERY = "where is the cat?"
PROMPT = "The list of"
DATE = "March 5, 2021"
MASKED = "the [MASK] sleeps"
MAX_TOKENS = 12
TOOL_ARGUMENTS = {"city": "Oslo"}
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Requests of each load generator.
REQUESTS = 10


@dataclass(frozen=True)
class Addresses:
    """Addresses of a server, and of a gateway before it for each default model.

    Attributes:
        http, grpc: host and port of the server.
        gateway: URL of a gateway by the name of its default model.
        folders: folder of the checkpoint by the name of its model.
    """

    http: str
    grpc: str
    gateway: Mapping[str, str]
    folders: Mapping[str, str]


@dataclass(frozen=True)
class Call:
    """One way to call a foreign client.

    Attributes:
        client: name of the client's distribution.
        name: name of the function.
        answer: the answer that must come back, such as `vectors`.
        run: function that calls the client.
        refused: part of the error that must come instead; None if the call is served.
    """

    client: str
    name: str
    answer: str
    run: Callable[[Addresses], Any]
    refused: str | None = None


CALLS: list[Call] = []
_Run = TypeVar("_Run", bound=Callable[[Addresses], Any])


def call(client: str, answer: str, *, refused: str | None = None) -> Callable[[_Run], _Run]:
    """Add a function to the table."""

    def add(run: _Run) -> _Run:
        CALLS.append(Call(client, run.__name__, answer, run, refused))
        return run

    return add
