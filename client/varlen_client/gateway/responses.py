"""OpenAI's `/v1/responses` for texts and functions, whole or as an event stream.

The gateway keeps no answers: each request has its whole conversation.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field
from starlette.responses import Response

from varlen_client.errors import InvalidRequest, VarlenClientError
from varlen_client.gateway.answers import EventStream, Frames, numbered
from varlen_client.gateway.bodies import ListOf, Object
from varlen_client.gateway.errors import client_error_body
from varlen_client.gateway.generation import (
    MAX_MESSAGES,
    Message,
    TextPart,
    for_template,
    parts_of,
    template_variables,
)
from varlen_client.gateway.json_io import json_bytes, json_response
from varlen_client.gateway.metrics import GatewayMetrics
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.sampling import IgnoredFields, ServerFields
from varlen_client.gateway.tool_calls import Call, ChatForm, Delta
from varlen_client.gateway.tools import (
    MAX_TOOLS,
    ChatReader,
    Function,
    NameOfFunction,
    ToolRequest,
    plan_tools,
)
from varlen_client.gateway.unserved_fields import RESPONSES
from varlen_client.generation import GeneratedPart, Generation

Parts: TypeAlias = Annotated[ListOf[TextPart], BeforeValidator(parts_of)]


class Item(Object):
    """A message, a call of a function, its output, or reasoning; `type` says which."""

    noun = "item"

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: Any = None
    """Ignored."""
    id: Any = None
    """Ignored, as answers are not kept."""
    status: Any = None
    """Ignored."""
    encrypted_content: Any = None
    """Ignored."""
    phase: Any = None
    """Ignored."""

    def text(self, name: Literal["content", "output"]) -> str:
        """Return the texts of a field that the item must have."""
        parts: list[TextPart] = self.required(name)
        return "".join(part.text for part in parts)

    def required(self, name: str) -> Any:
        """Return a field.

        Raises:
            InvalidRequest: the item lacks it.
        """
        value = getattr(self, name)
        if value is None:
            raise InvalidRequest(f"an item of type {self.type} has no {name}; send it")
        return value


class FunctionTool(Object):
    """A function that the model may call."""

    noun = "tool"

    type: Literal["function"]
    name: NameOfFunction
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object."""
    strict: bool | None = None
    """Ignored: the arguments of a forced call have the schema, and of others they may not."""

    def function(self) -> Function:
        """Return the function as chats have it."""
        return Function(name=self.name, description=self.description, parameters=self.parameters)


class ChosenFunction(Object):
    """The function that has to be called."""

    noun = "tool_choice"

    type: Literal["function"]
    name: str


class Format(Object):
    """The form of the text."""

    model_config = ConfigDict(populate_by_name=True)
    noun = "format"

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return what the text has to match; None is any text."""
        if (self.schema_ is None) == (self.type == "json_schema"):
            has = "no schema" if self.schema_ is None else "a schema"
            raise InvalidRequest(
                f"text.format of type {self.type} has {has}; a schema belongs to json_schema"
            )
        if self.type == "text":
            return None
        return {"json_object": True} if self.schema_ is None else {"json": self.schema_}


class TextOptions(Object):
    """Options of texts."""

    noun = "text"

    format: Format | None = None
    verbosity: Any = None
    """Ignored: no chat template reads it."""


def _items_of(given: Any) -> Any:
    """Return the items of an input, which may be one text."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesBody(ServerFields, IgnoredFields):
    """A request to `/v1/responses`."""

    unserved = RESPONSES

    input: Annotated[
        ListOf[Item],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_items_of),
    ]
    """A text, which is a message of the user, or items."""
    instructions: str | None = None
    """The first message, of the role system."""
    max_output_tokens: int | None = None
    stream: bool = False
    text: TextOptions | None = None
    tools: Annotated[ListOf[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    """vLLM's: name of one of the checkpoint's templates."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: variables of the chat template."""
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    reasoning: Any = None
    """Ignored: `chat_template_kwargs` sets what the chat template knows of it."""
    include: Any = None
    """Ignored."""
    stream_options: Any = None
    """Ignored: events are not padded."""

    def tool_request(self) -> ToolRequest:
        """Return the tools that the answer may call.

        Raises:
            InvalidRequest: see `ToolRequest.of`.
        """
        functions = [each.function() for each in self.tools or ()]
        is_parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, ChosenFunction):
            return ToolRequest.of(functions, None, self.tool_choice.name, is_parallel)
        return ToolRequest.of(functions, self.tool_choice, None, is_parallel)

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation in the form that chat templates read.

        Raises:
            InvalidRequest: an item lacks a field.
        """
        found: list[dict[str, Any]] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        reasoning = ""
        for item in self.input:
            if item.type == "reasoning":
                reasoning = "".join(part.text for part in item.content or ())
                continue
            if item.type == "function_call_output":
                output = {"tool_call_id": item.required("call_id"), "content": item.text("output")}
                found.append({"role": "tool", **output})
            elif item.type == "function_call":
                _add_call(found, item)
            else:
                found.append({"role": item.required("role"), "content": item.text("content")})
            if reasoning and found[-1]["role"] == "assistant":
                found[-1]["reasoning_content"], reasoning = reasoning, ""
        return for_template([Message.model_validate(each) for each in found])

    def sampling(self, default_tokens: int, *, strict: bool) -> dict[str, Any]:
        """Return the sampling parameters.

        Args:
            default_tokens: length of an answer without a limit.
            strict: see `template_variables`.
        """
        most = self.max_output_tokens
        options = {**self.server_options(), "max_tokens": default_tokens if most is None else most}
        form = self.text.format.structured_outputs() if self.text and self.text.format else None
        if form is not None:
            options["structured_outputs"] = form
        variables = template_variables(self.chat_template, self.chat_template_kwargs, strict=strict)
        return options | ({"chat_template_kwargs": variables} if variables else {})


def _add_call(messages: list[dict[str, Any]], item: Item) -> None:
    """Add a call to the message of the assistant before it, or a new one."""
    function = {"name": item.required("name"), "arguments": item.required("arguments")}
    call = {"id": item.required("call_id"), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


async def responses(gateway: Gateway, body: ResponsesBody) -> Response:
    """Answer a conversation, which each request has as a whole."""
    settings, tools = gateway.settings, body.tool_request()
    messages = body.messages()
    sampling = body.sampling(settings.chat_max_tokens, strict=settings.strict)
    model = await gateway.models.get(body.model)
    plan = await plan_tools(gateway.forms, model.name, model.client, tools, sampling)
    reader = plan.reader or ChatReader(ChatForm(), ToolRequest())
    sampling = {**plan.sampling, **model.options}
    answer = _Answer(body, model.name, reader, gateway.metrics)
    timeout = settings.timeout_seconds
    with plan.naming_schemas():
        if body.stream:
            stream = model.client.stream_samples(messages, 1, timeout=timeout, **sampling)
            response: Response = await EventStream.begin(numbered([stream], 1), answer)
        else:
            [whole] = await model.client.samples(messages, 1, timeout=timeout, **sampling)
            response = json_response(answer.whole(whole))
    response.headers.update(plan.headers)
    return response


# An event of a stream, without its number.
_Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _Answer(Frames):
    """One answer: its object, and the events of its stream."""

    body: ResponsesBody
    model: str
    reader: ChatReader
    metrics: GatewayMetrics
    _id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    _created: int = field(default_factory=lambda: int(time.time()))
    _items: list[dict[str, Any]] = field(default_factory=list)
    _is_open: bool = False
    _status: str = "in_progress"
    _events: int = 0
    _tokens: int = 0
    _prompt_tokens: int = 0

    done = b""

    def whole(self, answer: Generation) -> dict[str, Any]:
        """Return the object of a whole answer."""
        for _ in self._read(answer):
            pass
        self.metrics.count_tokens(self._prompt_tokens, self._tokens)
        return self._object()

    def of(self, first: int, parts: Sequence[GeneratedPart]) -> Iterator[_Event]:  # noqa: ARG002 - as all
        """Yield the events of the next part."""
        if not self._events:
            for kind in ("created", "in_progress"):
                yield self._numbered({"type": f"response.{kind}", "response": self._object()})
        for event in self._read(parts[0]):
            yield self._numbered(event)

    def last(self) -> Iterator[_Event]:
        """Yield the last event."""
        self.metrics.count_tokens(self._prompt_tokens, self._tokens)
        yield self._numbered({"type": f"response.{self._status}", "response": self._object()})

    def failed(self, error: VarlenClientError) -> Iterator[_Event]:
        """Yield the event of a failure."""
        found = client_error_body(error)[1]["error"]
        named = {name: found[name] for name in ("message", "code", "param")}
        yield self._numbered({"type": "error", **named})

    def frame(self, event: _Event) -> bytes:
        """Return an event as the stream has it."""
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_bytes(event))

    def _numbered(self, event: _Event) -> _Event:
        self._events += 1
        return {**event, "sequence_number": self._events - 1}

    def _read(self, part: Generation | GeneratedPart) -> Iterator[_Event]:
        """Yield the events of a part."""
        delta, _ = self.reader.read(0, part)
        self._tokens += len(part.token_ids)
        self._prompt_tokens = part.num_prompt_tokens
        yield from self._add(delta)
        if part.finish_reason is not None:
            self._status = "incomplete" if part.finish_reason == "length" else "completed"
            yield from self._close(self._status)

    def _add(self, delta: Delta) -> Iterator[_Event]:
        if delta.reasoning:
            yield from self._open("reasoning", {"summary": [], "content": []})
            yield from self._add_text("reasoning_text", delta.reasoning)
        if delta.content:
            yield from self._open("message", {"role": "assistant", "content": []})
            yield from self._add_text("output_text", delta.content)
        for call in delta.calls:
            yield from self._add_call(call)

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[_Event]:
        """Begin an item, unless the last one is of this kind and goes on."""
        if self._is_open and self._items[-1]["type"] == kind != "function_call":
            return
        yield from self._close("completed")
        item_id = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._is_open = True
        yield self._event("output_item.added", item=_copied(item))

    def _add_text(self, kind: str, text: str) -> Iterator[_Event]:
        item = self._items[-1]
        if not item["content"]:
            item["content"].append(_part(kind, ""))
            if kind == "output_text":
                yield self._event("content_part.added", part=_part(kind, ""), **self._at())
        item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        yield self._event(f"{kind}.delta", delta=text, **self._at(), **more)

    def _add_call(self, call: Call) -> Iterator[_Event]:
        if call.name is not None:
            fields = {"call_id": call.id, "name": call.name, "arguments": ""}
            yield from self._open("function_call", fields)
        if call.arguments:
            self._items[-1]["arguments"] += call.arguments
            yield self._event(
                "function_call_arguments.delta",
                item_id=self._items[-1]["id"],
                delta=call.arguments,
            )

    def _close(self, status: str) -> Iterator[_Event]:
        """End the item that goes on."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event(
                "function_call_arguments.done",
                item_id=item["id"],
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            [part] = item["content"]
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield self._event(f"{part['type']}.done", text=part["text"], **self._at(), **more)
            if part["type"] == "output_text":
                yield self._event("content_part.done", part=part, **self._at())
        yield self._event("output_item.done", item=_copied(item))

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> _Event:
        return {"type": f"response.{kind}", "output_index": len(self._items) - 1, **fields}

    def _object(self) -> dict[str, Any]:
        """Return the answer up to now."""
        body = self.body
        has_ended = self._status != "in_progress"
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt_tokens + self._tokens,
        }
        choice = body.tool_choice
        given = body.text.format if body.text else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if self._status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [_copied(each) for each in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {
                "format": given.model_dump(by_alias=True, exclude_none=True)
                if given
                else {"type": "text"}
            },
            "tool_choice": choice.model_dump()
            if isinstance(choice, ChosenFunction)
            else choice or "auto",
            "tools": [_tool(each) for each in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage if has_ended else None,
            "metadata": {},
        }


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is now."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [dict(part) for part in item["content"]]}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    names = ("type", "name", "description", "parameters", "strict")
    return {name: getattr(tool, name) for name in names}
