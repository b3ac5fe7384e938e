"""OpenAI's `/v1/chat/completions`; the checkpoint's chat template makes the prompt."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import FastAPI
from pydantic import Field, model_validator
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.answers import (
    Chunks,
    EventStream,
    Head,
    ReportedToken,
    reported_tokens,
    whole_answer,
)
from varlen_client.gateway.bodies import ListOf, Object
from varlen_client.gateway.json_writing import json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.sampling import SamplingBody
from varlen_client.gateway.unserved_fields import CHATS
from varlen_client.generation import GeneratedPart, Generation

MAX_MESSAGES = 4096

# Field that says which of the tools are called, by the field of the tools.
_CHOICES = {"tools": "tool_choice", "functions": "function_call"}


class TextPart(Object):
    """A part of a message; only texts are served."""

    type: Literal["text"]
    text: str


class Message(Object):
    """A message of the chat."""

    role: Literal["developer", "system", "user", "assistant"]
    content: str | ListOf[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, given: Any) -> Any:
        """Answers that come back as messages have fields such as `refusal: null`, `annotations: []`."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value not in (None, [])}

    def for_template(self) -> dict[str, str]:
        """Return the message in the form that chat templates read."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message = {"role": self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


# A longer list is refused before each message has been checked.
Messages: TypeAlias = Annotated[ListOf[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(SamplingBody):
    """A request to `/v1/chat/completions`."""

    unserved = CHATS

    messages: Messages
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    tools: Annotated[ListOf[Any], Field(max_length=0)] | None = None
    """Not supported; it may be empty, or there with a choice of none, which calls none."""
    tool_choice: Literal["none"] | None = None
    functions: Annotated[ListOf[Any], Field(max_length=0)] | None = None
    """Older name of `tools`."""
    function_call: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    """Ignored: there are no calls."""
    modalities: ListOf[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """Ignored: `chat_template_kwargs` sets what the chat template knows of it, such as `enable_thinking`."""
    # vLLM's
    include_reasoning: Literal[True] | None = None
    echo: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    return_prompt_text: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_unused_tools(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        unused = {tools for tools, choice in _CHOICES.items() if given.get(choice) == "none"}
        return {name: value for name, value in given.items() if name not in unused}


def add_chat_route(app: FastAPI, gateway: Gateway) -> None:
    """Add the route of chats."""

    @app.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(body: ChatBody) -> Response:
        """Answer the last message of a chat."""
        sampling = _sampling(body, gateway.settings.chat_max_tokens)
        messages = [message.for_template() for message in body.messages]
        model = await gateway.models.get(body.model)
        timeout, top = gateway.settings.timeout_seconds, body.top_logprobs or 0
        if body.stream:
            head = Head.new("chatcmpl", "chat.completion.chunk", model.name, body.request_id)
            parts = model.client.stream_samples(messages, body.n, timeout=timeout, **sampling)
            chunks = Chunks(head, partial(_delta, top), body.includes_usage, gateway.metrics)
            return await EventStream.begin(parts, chunks)
        head = Head.new("chatcmpl", "chat.completion", model.name, body.request_id)
        answers = await model.client.samples(messages, body.n, timeout=timeout, **sampling)
        return json_response(whole_answer(head, [answers], partial(_choice, top), gateway.metrics))


def _sampling(body: ChatBody, default_max_tokens: int) -> dict[str, Any]:
    """Return the sampling parameters of a chat.

    Raises:
        InvalidRequest: `top_logprobs` without `logprobs`, or fields that contradict each other.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true")
    given = body.max_completion_tokens, body.max_tokens, default_max_tokens
    sampling = body.sampling()
    sampling["max_tokens"] = next(each for each in given if each is not None)
    if body.chat_template_kwargs:
        sampling["chat_template_kwargs"] = body.chat_template_kwargs
    return sampling | ({"logprobs": body.top_logprobs or 0} if body.logprobs else {})


def _choice(
    top: int, index: int, part: Generation | GeneratedPart, _: int | None
) -> dict[str, Any]:
    message = {"role": "assistant", "content": part.text}
    return {"index": index, "message": message, **_ending(part, top)}


def _delta(
    top: int, index: int, part: Generation | GeneratedPart, sent: int | None
) -> dict[str, Any]:
    role = {"role": "assistant"} if sent is None else {}
    return {"index": index, "delta": {**role, "content": part.text}, **_ending(part, top)}


def _ending(part: Generation | GeneratedPart, top: int) -> dict[str, Any]:
    """Return the end of a choice, with `top` tokens in each of its `top_logprobs`."""
    content = [
        {
            **_token(chosen),
            "top_logprobs": [_token(each) for each in _most_likely(chosen, found, top)],
        }
        for chosen, found in reported_tokens(part)
    ]
    return {
        "logprobs": {"content": content} if content else None,
        "finish_reason": part.finish_reason,
    }


def _most_likely(
    chosen: ReportedToken, found: list[ReportedToken], top: int
) -> list[ReportedToken]:
    """Return `top` tokens, with the chosen one in the last place if it is less likely, as vLLM does."""
    tokens = found[:top]
    return tokens if chosen in tokens else [*tokens[:-1], chosen][:top]


def _token(token: ReportedToken) -> dict[str, Any]:
    encoded = None if token.utf8 is None else [*token.utf8]
    return {"token": token.text, "logprob": token.logprob, "bytes": encoded}
