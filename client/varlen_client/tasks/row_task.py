"""A task of rows: what its method sends, and how its answer is read.

Each file beside this one is a room of related tasks. It has their options, their answers, their tasks, and the methods
of both clients.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from typing_extensions import TypedDict

from varlen_client.errors import InvalidRequest
from varlen_client.tasks.answers import TOKEN_COUNTS, RowAnswers, RowOutput
from varlen_client.tasks.command import Command
from varlen_client.wire import Inputs, ModelInfo, Pairs, Parameters, check_not_a_string

_Answer = TypeVar("_Answer")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

Outputs: TypeAlias = tuple[RowOutput, ...]
Options: TypeAlias = Mapping[str, Any]
TruncationSide: TypeAlias = Literal["right", "left"]
InputType: TypeAlias = Literal[
    "query",
    "passage",
    "search_query",
    "search_document",
    "document",
    "classification",
    "clustering",
]
# vLLM's names of tasks.
Pooling: TypeAlias = Literal["embed", "token_embed", "classify", "token_classify"]

# Largest value of a request parameter.
_LARGEST_INTEGER = 2**63 - 1
# Parameters whose names differ in the protocol.
_WIRE_NAMES = {"priority": "request_priority"}
# Options of the call, not of its requests.
_CALL_OPTIONS = ("timeout", "on_progress")


class CallOptions(TypedDict, total=False):
    """Options of every method; None is the default of each.

    deadline_ms: milliseconds for each request, retries included. The server refuses requests that it cannot answer in
        time. By default no limit.
    priority: 0 to 9, larger runs sooner; by default 0.
    timeout: seconds for the whole call, retries included; by default no limit.
    on_progress: called with the number of rows answered so far, in the thread of the event loop. It must return
        quickly, and not call a sync client.
    """

    deadline_ms: float | None
    priority: int | None
    timeout: float | None
    on_progress: Callable[[int], None] | None


class ModelOptions(CallOptions, total=False):
    """Options of every method that runs a model.

    tenant: name of the client for whom the rows are; each has an equal share of the model.
    cache_salt: the server's caches share entries only between requests of the same salt.
    adapter: name of the adapter that changes the model for these rows.
    """

    tenant: str | None
    cache_salt: str | None
    adapter: str | None


class RowOptions(ModelOptions, total=False):
    """Options of methods whose texts may be cut.

    truncate: cut texts that are too long; by default the server refuses them.
    truncate_prompt_tokens: cut texts to this many tokens, special tokens included; no `truncate` is needed.
    truncation_side: "left" cuts their beginning, "right" their end; by default the checkpoint decides.
    """

    truncate: bool | None
    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None


@dataclass(frozen=True, slots=True)
class RowTask(Generic[_Answer]):
    """A method of the clients that sends rows, and returns an `_Answer`.

    Attributes:
        outputs: requested outputs, or a function that returns them for options.
        read: function that returns the answer, given the outputs of all requests.
        needs_width: width of the first output, if only one is served.
        takes_pairs: whether a row may be a pair of texts.
        row_by_row: whether each row is its own request, since the server pads the rows of one to the longest.
        not_sent: options that the client itself follows.
        command: command of `varlen` that prints its answers.
        pooling: name of the task at vLLM's `/pooling`, if the gateway answers there with the first output.
    """

    method: str
    options: type
    outputs: Outputs | Callable[[Options], Outputs]
    read: Callable[[RowAnswers], _Answer]
    needs_width: int | None = None
    takes_pairs: bool = False
    row_by_row: bool = False
    not_sent: Collection[str] = ()
    command: Command[Any] | None = None
    pooling: Pooling | None = None

    def of(self, inputs: Inputs | Pairs, options: Options) -> Asked[_Answer]:
        """Return the call of this method with these rows.

        Raises:
            InvalidRequest: spans are of one text, and there are others.
        """
        if options.get("spans") is not None and len(inputs) != 1:
            raise InvalidRequest(f"spans are parts of one text, and there are {len(inputs)}")
        return Asked(self, inputs, options)

    def requested(self, options: Options) -> Outputs:
        """Return the outputs of a call; raises InvalidRequest for a wrong option."""
        return self.outputs if isinstance(self.outputs, tuple) else self.outputs(options)

    def of_model(self, outputs: Outputs, info: ModelInfo, *, counts_tokens: bool) -> Outputs:
        """Return requested outputs with the widths of a model.

        Args:
            counts_tokens: whether the number of tokens is requested too, if the model has it.

        Raises:
            InvalidRequest: the model does not serve them.
        """
        if counts_tokens and TOKEN_COUNTS.name in info.outputs and TOKEN_COUNTS not in outputs:
            outputs = (*outputs, TOKEN_COUNTS)
        # two outputs may have one name in a model
        found = tuple(
            {
                each.name: each for each in (it.of_model(self.method, info) for it in outputs)
            }.values()
        )
        if self.needs_width not in (None, found[0].width):
            raise InvalidRequest(
                f"model {info.name!r} gives {found[0].width} values per row; "
                f"{self.method} needs {self.needs_width}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Asked(Generic[_Answer]):
    """What a method asks: its task, rows and options."""

    task: RowTask[_Answer]
    inputs: Inputs | Pairs
    options: Options


class AsyncAsks:
    """A client whose methods are coroutines."""

    async def ask(self, asked: Asked[_Answer]) -> _Answer:
        """Return the answer to what a method asks."""
        raise NotImplementedError


class SyncAsks:
    """A client whose methods wait."""

    def ask(self, asked: Asked[_Answer]) -> _Answer:
        """Return the answer to what a method asks."""
        raise NotImplementedError


class Method(Protocol[_P, _T_co]):
    """A method of both clients; it waits, or is a coroutine, as the client does."""

    @overload
    def __get__(
        self, client: AsyncAsks, owner: object
    ) -> Callable[_P, Coroutine[Any, Any, _T_co]]: ...

    @overload
    def __get__(self, client: SyncAsks, owner: object) -> Callable[_P, _T_co]: ...

    def __get__(self, client: Any, owner: object) -> Any:
        """Return the method of a client."""


def method(asked: Callable[Concatenate[Any, _P], Asked[_T]]) -> Method[_P, _T]:
    """Return a method that returns the answer to what a function asks."""

    @functools.wraps(asked)
    def answer(client: Any, /, *arguments: _P.args, **options: _P.kwargs) -> Any:
        return client.ask(asked(client, *arguments, **options))

    return cast("Method[_P, _T]", answer)


def parameters_of(
    method: str, declared: type, options: Options, not_sent: Collection[str] = ()
) -> Parameters:
    """Return the parameters of requests, by their names in the protocol.

    Args:
        not_sent: options that the client itself follows.

    Raises:
        TypeError: there is no such option.
        InvalidRequest: an integer is larger than the protocol's, or labels are a single string.
    """
    for name, value in options.items():
        if name not in declared.__annotations__:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise InvalidRequest(f"{name} is {value}; allowed: up to {_LARGEST_INTEGER}")
    return {
        _WIRE_NAMES.get(name, name): _LISTS[name](value) if name in _LISTS else value
        for name, value in options.items()
        if value is not None and name not in (*_CALL_OPTIONS, *not_sent)
    }


def _labels(labels: Collection[str]) -> str:
    check_not_a_string(labels)
    return json.dumps(list(labels))


def _spans(spans: Collection[Collection[int]]) -> str:
    check_not_a_string(spans)
    return json.dumps([[int(place) for place in span] for span in spans], separators=(",", ":"))


# Writers of lists and objects as JSON: the protocol has none.
_LISTS: Mapping[str, Callable[[Any], str]] = {
    "labels": _labels,
    "schema": json.dumps,
    "spans": _spans,
}
