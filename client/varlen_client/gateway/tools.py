"""Tools of chats: fields, the form of a model's calls, answers with calls and reasoning.

The forms and the parser are in `tool_calls`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from varlen_client.aio import AsyncClient
from varlen_client.errors import InvalidRequest, ServerError
from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.bodies import ListOf, Object
from varlen_client.gateway.tool_calls import (
    PROBE_CHAT,
    PROBE_TOOLS,
    TOOL_FORMS,
    AnswerParser,
    ChatForm,
    Delta,
    ToolForm,
    forced_schema,
    form_of,
)
from varlen_client.generation import FinishReason, GeneratedPart, Generation, Messages

# As many as OpenAI takes.
MAX_TOOLS = 128
# The server takes about as many in the variables of a template, and in a grammar.
MAX_TOOL_CHARACTERS = 60_000
# Levels of objects and lists in one tool; the server takes two more.
MAX_TOOL_LEVELS = 14

# Header of an answer that does not call the tools of its request.
NO_TOOLS = {"X-Varlen-Warning": "tools are not served; the answer is text"}
# In the server's refusals of grammars.
_GRAMMAR_REFUSAL = "structured_outputs cannot be served: "
# Name of the template for tools in checkpoints that have several.
_TOOL_TEMPLATE = "tool_use"
# Longest time for which a form is known, and number of forms: a model may be loaded again.
_FORM_SECONDS = 30.0
_MAX_FORMS = 64

Variables: TypeAlias = Mapping[str, Any]


NameOfFunction: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class Function(Object):
    """A function that the model may call."""

    noun = "function"

    name: NameOfFunction
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object."""
    strict: Any = None
    """Ignored: the arguments of a forced call have the schema, and of others they may not."""


class Tool(Object):
    """A tool that the model may call."""

    noun = "tool"

    type: Literal["function"]
    function: Function


class FunctionName(Object):
    """The name of a function."""

    noun = "tool_choice.function"

    name: str


class NamedTool(Object):
    """The tool that has to be called."""

    noun = "tool_choice"

    type: Literal["function"]
    function: FunctionName


Tools: TypeAlias = Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = Literal["auto", "none", "required", ""] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of a request.

    Attributes:
        functions: functions that the model may call.
        choice: whether the model decides on calls, or has to call a function, or the named one.
        name: function that has to be called.
        is_parallel: whether there may be several calls.
    """

    functions: Sequence[Function] = ()
    choice: Literal["auto", "required", "named"] = "auto"
    name: str | None = None
    is_parallel: bool = True

    @classmethod
    def of(
        cls, functions: Sequence[Function], choice: str | None, name: str | None, parallel: bool
    ) -> ToolRequest:
        """Return the tools of a request.

        Args:
            choice: auto, none or required; None is auto.
            name: function that has to be called, if there is one.

        Raises:
            InvalidRequest: the choice asks for a tool that there is not, or the tools are too large.
        """
        names = [each.name for each in functions]
        if name is not None and name not in names:
            raise InvalidRequest(
                f"tool_choice names the function {name!r}; allowed: the names of tools,"
                f" {', '.join(names) or 'which has none'}"
            )
        if choice == "required" and not functions:
            raise InvalidRequest("tool_choice is required, and there are no tools; send tools")
        if choice == "none":
            return cls()
        twice = sorted({each for each in names if names.count(each) > 1})
        if twice:
            raise InvalidRequest(f"tools has two functions with the name {twice[0]!r}; send one")
        for each in functions:
            kind = (each.parameters or {}).get("type", "object")
            if kind != "object":
                raise InvalidRequest(
                    f"parameters of the function {each.name!r} have the type {kind!r}; allowed: object"
                )
        request = cls(
            functions,
            "named" if name is not None else "required" if choice == "required" else "auto",
            name,
            parallel,
        )
        request._check_size()
        return request

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice != "auto"

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of arguments, by function."""
        empty = {"properties": {}, "additionalProperties": False}
        return {each.name: each.parameters or empty for each in self.functions}

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools in the form that chat templates read, which is OpenAI's."""
        empty = {"type": "object", "properties": {}}
        return [
            {
                "type": "function",
                "function": {
                    "name": each.name,
                    "description": each.description or "",
                    "parameters": each.parameters or empty,
                },
            }
            for each in self.functions
        ]

    def _check_size(self) -> None:
        level: list[Any] = self.for_template()
        for _ in range(MAX_TOOL_LEVELS):
            level = [inner for each in level for inner in _items(each)]
        if level:
            raise InvalidRequest(
                f"tools are nested more than {MAX_TOOL_LEVELS} deep; send flatter schemas, with $defs for inner objects"
            )
        size = len(json.dumps(self.for_template()))
        if size > MAX_TOOL_CHARACTERS:
            raise InvalidRequest(
                f"tools have {size} characters as JSON; allowed: up to {MAX_TOOL_CHARACTERS}, so send fewer tools or"
                " shorter descriptions"
            )


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, list) else ()


class ChatForms:
    """The forms of models' answers, asked for once in a while."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._known: dict[tuple[str, bytes, bool], tuple[float, ChatForm]] = {}

    async def of(
        self, name: str, client: AsyncClient, variables: Variables, *, has_tools: bool
    ) -> ChatForm:
        """Return the form of a model's answers.

        Args:
            name: name of the model.
            client: client of the model.
            variables: variables of the chat template that the request has.
            has_tools: whether the request has tools, so that a template for tools is used.
        """
        # a hash: the variables may be as long as a body
        given = sha256(json.dumps(variables, sort_keys=True).encode()).digest()
        key = name, given, has_tools
        until, form = self._known.get(key, (-math.inf, ChatForm()))
        now = time.monotonic()
        if now > until:
            form = self._as_set(await self._ask(client, variables, has_tools=has_tools))
            self._known[key] = now + _FORM_SECONDS, form
            while len(self._known) > _MAX_FORMS:
                del self._known[next(iter(self._known))]
        return form

    def _as_set(self, form: ChatForm) -> ChatForm:
        """Return a form with what the settings say of it."""
        calls = TOOL_FORMS.get(self.settings.tool_calls)
        if calls is not None:
            form = replace(form, reads_tools=True, calls=calls, has_special_tokens=True)
        if self.settings.reasoning == "none":
            form = replace(form, reasoning=None, opens_reasoning=False)
        return form

    async def _ask(self, client: AsyncClient, variables: Variables, *, has_tools: bool) -> ChatForm:
        if has_tools and "chat_template" not in variables:
            own = await self._rendered(
                client, PROBE_CHAT, {**variables, "chat_template": _TOOL_TEMPLATE}
            )
            if own is not None:
                return replace(form_of(*own), template=_TOOL_TEMPLATE)
        for chat in (PROBE_CHAT, PROBE_CHAT[:1]):
            found = await self._rendered(client, chat, variables)
            if found is not None:
                return form_of(*found)
        return ChatForm()

    async def _rendered(
        self, client: AsyncClient, chat: Messages, variables: Variables
    ) -> tuple[str, str] | None:
        """Return a prompt with and without special tokens; None where it is refused."""
        options = {**variables, "tools": PROBE_TOOLS, "ignore_unread": True}
        timeout = self.settings.timeout_seconds
        try:
            [found] = await client.tokenize([chat], timeout=timeout, chat_template_kwargs=options)
            with_special, without = await asyncio.gather(
                client.detokenize([found.token_ids], timeout=timeout, skip_special_tokens=False),
                client.detokenize([found.token_ids], timeout=timeout, skip_special_tokens=True),
            )
        except (InvalidRequest, ServerError):
            return None
        return with_special[0], without[0]


class ChatReader:
    """Makes messages and deltas with calls and reasoning of the texts of several answers."""

    def __init__(self, form: ChatForm, tools: ToolRequest, *, has_reasoning: bool = True) -> None:
        """Start before all answers.

        Args:
            has_reasoning: whether reasoning is sent.
        """
        self._form, self._tools, self._has_reasoning = form, tools, has_reasoning
        self._parsers: dict[int, AnswerParser] = {}

    def read(
        self, index: int, part: Generation | GeneratedPart
    ) -> tuple[Delta, FinishReason | Literal["tool_calls"] | None]:
        """Return what a part adds to an answer, and why it ends, if it does.

        Args:
            index: number of the answer.
        """
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = AnswerParser(
                self._form,
                self._tools.schemas,
                choice="forced" if self._tools.is_forced else "auto",
                is_parallel=self._tools.is_parallel,
            )
        delta = parser.add(part.text, is_last=part.finish_reason is not None)
        if not self._has_reasoning:
            delta.reasoning = ""
        # as OpenAI ends the call of a named function
        calls = parser.num_calls and self._tools.choice != "named"
        return delta, "tool_calls" if calls and part.finish_reason == "stop" else part.finish_reason

    def fields(
        self, index: int, part: Generation | GeneratedPart, *, is_whole: bool
    ) -> tuple[dict[str, Any], FinishReason | Literal["tool_calls"] | None]:
        """Return the fields of a message, or of a delta, and why the answer ends.

        Args:
            is_whole: whether the part is a whole answer.
        """
        delta, reason = self.read(index, part)
        calls = [each.delta() for each in delta.calls]
        fields: dict[str, Any] = {}
        if is_whole:
            for each in calls:
                del each["index"]
            fields["content"] = None if calls and not delta.content else delta.content
        elif delta.content:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if calls:
            fields["tool_calls"] = calls
        return fields, reason


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How a request with tools is answered.

    Attributes:
        sampling: sampling parameters with the tools.
        reader: reader of its answers; None where they are texts.
        ignores_tools: whether the model does not see the tools.
        is_forced: whether the sampling parameters have the schemas of the tools.
    """

    sampling: dict[str, Any]
    reader: ChatReader | None
    ignores_tools: bool = False
    is_forced: bool = False

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer."""
        return NO_TOOLS if self.ignores_tools else {}

    @contextmanager
    def naming_schemas(self) -> Iterator[None]:
        """Say in the refusal of a grammar that it is of the tools."""
        try:
            yield
        except InvalidRequest as error:
            _, is_of_grammar, reason = str(error).partition(_GRAMMAR_REFUSAL)
            if not (self.is_forced and is_of_grammar):
                raise
            raise InvalidRequest(
                f"the schemas of the tools cannot be forced: {reason}; send tool_choice: auto, or other schemas"
            ) from None


async def plan_tools(
    forms: ChatForms,
    name: str,
    client: AsyncClient,
    tools: ToolRequest,
    sampling: Mapping[str, Any],
    *,
    has_reasoning: bool = True,
) -> ToolPlan:
    """Return how a request is answered by a model.

    Args:
        name: name of the model.
        client: client of the model.
        sampling: sampling parameters of the request.
        has_reasoning: whether the answer has reasoning.

    Raises:
        InvalidRequest: the model cannot call tools as the request needs it.
    """
    settings = forms.settings
    options = dict(sampling)
    if not tools.functions and settings.reasoning == "none":
        return ToolPlan(options, None)
    variables = options.get("chat_template_kwargs") or {}
    form = await forms.of(name, client, variables, has_tools=bool(tools.functions))
    if tools.functions:
        if settings.tool_calls == "none" or not form.reads_tools:
            _check_ignored(tools, settings)
            tools = ToolRequest()
            return ToolPlan(options, _reader(form, tools, has_reasoning), ignores_tools=True)
        if form.calls is None:
            raise InvalidRequest(
                "tools: the chat template of this model writes calls in a form that is not known here; send no tools,"
                f" or start the gateway with --tool-calls and one of {', '.join(TOOL_FORMS)}"
            )
        _add_tools(options, form, form.calls, tools, variables)
    reader = _reader(form, tools, has_reasoning)
    if reader is not None and form.has_special_tokens and not tools.is_forced:
        options.setdefault("skip_special_tokens", False)
    return ToolPlan(options, reader, is_forced=tools.is_forced)


def _reader(form: ChatForm, tools: ToolRequest, has_reasoning: bool) -> ChatReader | None:
    if not tools.functions and form.reasoning is None:
        return None
    return ChatReader(form, tools, has_reasoning=has_reasoning)


def _check_ignored(tools: ToolRequest, settings: GatewaySettings) -> None:
    """Raise InvalidRequest if tools that the model does not see are more than an offer."""
    reason = "the chat template of this model reads no tools"
    if settings.tool_calls == "none":
        reason = "the gateway runs with --tool-calls none"
    if tools.is_forced:
        raise InvalidRequest(
            f"tool_choice forces a call, and {reason}; send tool_choice: auto, or response_format with the schema"
        )
    if settings.strict:
        raise InvalidRequest(f"tools are not supported: {reason}; leave them out")


def _add_tools(
    options: dict[str, Any],
    form: ChatForm,
    calls: ToolForm,
    tools: ToolRequest,
    variables: Variables,
) -> None:
    """Add the tools to the sampling parameters of a request."""
    if options.get("structured_outputs"):
        raise InvalidRequest(
            "the request has tools and a form of the answer, such as response_format; send one, or tool_choice: none"
        )
    template: dict[str, Any] = {} if form.template is None else {"chat_template": form.template}
    options["chat_template_kwargs"] = {**template, **variables, "tools": tools.for_template()}
    if tools.is_forced:
        schema = forced_schema(calls, tools.schemas, name=tools.name, is_parallel=tools.is_parallel)
        options["structured_outputs"] = {"json": schema}
