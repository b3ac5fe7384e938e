"""Options that all commands with requests have, and the client that they make.

A command takes them as one parameter, `options: RequestOptions` or `RowOptions`, with the decorator `with_options`.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from varlen_client.cli.options import DEFAULT_URLS, Model, Urls, exit_on_error, fail
from varlen_client.errors import InvalidRequest, VarlenClientError
from varlen_client.sync import Client
from varlen_client.tasks import COMMANDS
from varlen_client.tasks.row_task import TruncationSide
from varlen_client.wire import ModelInfo

# For a better message of an error; most models are known by then.
_EXPLANATION_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a command that sends requests.

    Attributes:
        command: name of the command; not an option.
    """

    command: str = ""
    urls: Urls = DEFAULT_URLS
    model: Model = None
    deadline_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Milliseconds for each request; the server refuses those it cannot meet.",
        ),
    ] = None
    priority: Annotated[
        int | None, typer.Option(min=0, max=9, help="Larger runs sooner; default: 0.")
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds for the whole command; default: no limit."),
    ] = None
    adapter: Annotated[
        str | None, typer.Option(help="Adapter that changes the model; default: none.")
    ] = None

    @contextmanager
    def connect(
        self, *, rows_per_request: int | None = None, concurrency: int | None = None
    ) -> Iterator[Client]:
        """Yield a client, whose errors end the command with a message."""
        with (
            exit_on_error(),
            Client(
                self.urls, self.model, rows_per_request=rows_per_request, concurrency=concurrency
            ) as client,
        ):
            began = time.monotonic()
            try:
                yield client
            except InvalidRequest:
                left = (self.timeout or math.inf) - (time.monotonic() - began)
                if message := _other_task(self.command, client, left):
                    fail(message)
                raise

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the client's methods; None is the default of each."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("command", "urls", "model")
        }


_OF_ALL_REQUESTS = frozenset(each.name for each in fields(RequestOptions))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions(RequestOptions):
    """Options of a command that sends rows to a model of one step."""

    truncate: Annotated[
        bool | None, typer.Option("--truncate", help="Truncate texts that are too long.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Truncate texts to this many tokens.")
    ] = None
    truncation_side: Annotated[
        TruncationSide | None, typer.Option(help="Which end is cut; default: the checkpoint's.")
    ] = None


def _other_task(command: str, client: Client, seconds: float) -> str | None:
    """Return the error of `other_task`; None also if the model is not known in time."""
    with suppress(VarlenClientError):
        info = client.model_info(timeout=max(0.0, min(seconds, _EXPLANATION_SECONDS)))
        return other_task(command, info)
    return None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has, instead of `options`, an option for each of its fields.

    Options of all requests come last.
    """
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["options"].annotation
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name],
        )
        for each in sorted(fields(kind), key=lambda each: each.name in _OF_ALL_REQUESTS)
        if each.name != "command"
    ]
    own = [each for name, each in signature.parameters.items() if name != "options"]

    @functools.wraps(command)
    def flat(**arguments: object) -> None:
        given = {each.name: arguments.pop(each.name) for each in shared}
        options = kind(command=command.__name__, **given)
        command(**arguments, options=options)

    flat.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]  # inspect's own hook
    return flat


# What the models of each task do and make, and what they are.
_WORDS: Mapping[str, tuple[str, str, str]] = {
    **{each.task: each.words for each in COMMANDS.values()},
    "generate": ("generates text", "generated text", "a model that generates"),
    "translate": ("translates texts", "translations", "a translation model"),
}
# The task of the models that a command asks, where it has another name.
_TASK_OF_COMMAND = {"similarity": "embed"}


def other_task(command: str, info: ModelInfo) -> str | None:
    """Return the error of a command on a model of another task, else None."""
    wanted = _TASK_OF_COMMAND.get(command, command)
    task = info.known_task
    if task is None or task not in _WORDS or wanted not in _WORDS:
        return None
    answered = {task}
    if task == "classify" and info.outputs.get("logits") == (1,):
        # of one label, its score
        answered.add("rerank")
    if info.task is None and task == "generate":
        answered.add("translate")
    if wanted in answered:
        return None
    (does, _, _), (_, makes, kind) = _WORDS[task], _WORDS[wanted]
    return (
        f"{info.name} {does}; it has no {makes}: ask it with `varlen {task.replace('_', '-')}`, or serve {kind}"
        " (--model names it)"
    )
