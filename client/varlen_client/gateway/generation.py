"""OpenAI's `/v1/completions` and `/v1/chat/completions`; the checkpoint's chat template makes the prompt of a chat."""

from __future__ import annotations

import asyncio
import json
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.answers import (
    Chunks,
    EventStream,
    Head,
    MakeChoice,
    ReportedToken,
    numbered,
    reported_tokens,
    whole_answer,
)
from varlen_client.gateway.bodies import ListOf, Object, Texts, refused_field, rows_of
from varlen_client.gateway.json_io import json_response
from varlen_client.gateway.models import Gateway, NamedModel
from varlen_client.gateway.sampling import SamplingBody
from varlen_client.gateway.tools import (
    NO_TOOLS,
    ChatReader,
    NamedTool,
    ToolChoice,
    ToolRequest,
    Tools,
    plan_tools,
)
from varlen_client.gateway.unserved_fields import CHATS, COMPLETIONS, MESSAGES, PARTS
from varlen_client.generation import GeneratedPart, Generation
from varlen_client.waits import all_or_first_error

MAX_PROMPTS = 128


class CompletionsBody(SamplingBody):
    """A request to `/v1/completions`."""

    ids_field = "prompt"
    unserved = COMPLETIONS

    prompt: Texts
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    """Whether each answer begins with the text of its prompt."""
    add_special_tokens: Literal[True] | None = None


async def completions(gateway: Gateway, body: CompletionsBody) -> Response:
    """Continue prompts, which are texts or token ids."""
    prompts = rows_of(body.prompt, "prompt", MAX_PROMPTS)
    sampling = _sampling(body)
    make_choice = partial(_choice, _echoed(body, prompts), body.n, body.logprobs is not None)
    model = await gateway.models.get(body.model)
    names = "cmpl", "text_completion"
    return await _answer(gateway, body, model, prompts, sampling, names, make_choice)


async def _answer(
    gateway: Gateway,
    body: SamplingBody,
    model: NamedModel,
    prompts: Sequence[Any],
    sampling: dict[str, Any],
    names: tuple[str, str],
    make_choice: MakeChoice,
) -> Response:
    """Return the answers to prompts; `names` are the beginning of their id, and their kind."""
    sampling = {**sampling, **model.options}
    prefix, kind = names
    head = Head.new(prefix, kind, model.name, body.request_id)
    timeout = gateway.settings.timeout_seconds
    if body.stream:
        streams = [
            model.client.stream_samples(prompt, body.n, timeout=timeout, **sampling)
            for prompt in prompts
        ]
        chunks = Chunks(head, make_choice, body.stream_usage, gateway.metrics)
        return await EventStream.begin(numbered(streams, body.n), chunks)
    tasks = [
        asyncio.ensure_future(
            model.client.samples(prompt, body.num_samples, timeout=timeout, **sampling)
        )
        for prompt in prompts
    ]
    await all_or_first_error(tasks)
    answers = [task.result() for task in tasks]
    return json_response(whole_answer(head, answers, body.n, make_choice, gateway.metrics))


def _sampling(body: CompletionsBody) -> dict[str, Any]:
    given = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
    return body.sampling() | {name: each for name, each in given.items() if each is not None}


def _echoed(body: CompletionsBody, prompts: Sequence[str | list[int]]) -> Sequence[str]:
    """Return the text that the answers to each prompt begin with.

    Raises:
        InvalidRequest: the text of a prompt, or log probabilities of its tokens, are not known here.
    """
    if not body.echo:
        return [""] * len(prompts)
    if body.logprobs is not None:
        raise InvalidRequest(
            "echo is True with logprobs, which a prompt's tokens have not; send one"
        )
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise InvalidRequest("echo is True with a prompt of token ids; allowed: with texts")
    return texts


def _choice(
    echoed: Sequence[str],
    n: int,
    has_logprobs: bool,
    index: int,
    part: Generation | GeneratedPart,
    offset: int | None,
) -> dict[str, Any]:
    """Return a choice, given the text that each prompt's `n` answers begin with."""
    return {
        "index": index,
        "text": echoed[index // n] + part.text if offset is None else part.text,
        "logprobs": _logprobs(part, offset or 0) if has_logprobs and part.logprobs else None,
        "finish_reason": part.finish_reason,
    }


def _logprobs(part: Generation | GeneratedPart, offset: int) -> dict[str, Any]:
    tokens, logprobs, top, offsets = [], [], [], []
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    for chosen, found in reported_tokens(part):
        tokens.append(chosen.text)
        logprobs.append(chosen.logprob)
        top.append(_by_text(chosen, found))
        offsets.append(offset)
        # a part of a character begins where the character does
        offset += len(chosen.text if chosen.utf8 is None else decoder.decode(chosen.utf8))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _by_text(chosen: ReportedToken, found: list[ReportedToken]) -> dict[str, float]:
    """Return log probabilities by text; a second token of one text has its id."""
    names = {chosen.token_id: chosen.text}
    taken = {chosen.text}
    for each in found:
        if each.token_id not in names:
            name = f"token_id:{each.token_id}" if each.text in taken else each.text
            names[each.token_id] = name
            taken.add(name)
    return {names[each.token_id]: each.logprob for each in found}


MAX_MESSAGES = 4096
# Characters of arguments that are parsed as JSON: more would hold up other requests.
MAX_ARGUMENT_CHARACTERS = 1 << 18


class TextPart(Object):
    """A part of a message; only texts are served."""

    noun = "content"
    unserved = PARTS

    type: Literal["text", "input_text", "output_text", "reasoning_text"] = "text"
    text: str
    source_lang_code: str | None = None
    """Language of the text, which the templates of translators such as TranslateGemma read."""
    target_lang_code: str | None = None
    """Language of the translation."""

    @property
    def languages(self) -> dict[str, str]:
        """The languages that it names, by field."""
        given = {
            "source_lang_code": self.source_lang_code,
            "target_lang_code": self.target_lang_code,
        }
        return {name: code for name, code in given.items() if code is not None}

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"text": given}
        if isinstance(given, dict) and given.get("type") == "refusal":
            return {"text": given.get("refusal")}
        return given


def parts_of(content: Any) -> Any:
    """Return the parts of a content, which may be one text."""
    if isinstance(content, str):
        return [{"text": content}]
    if not isinstance(content, list):
        raise PydanticCustomError("content_type", "Input should be a text, or a list of parts")
    return content


class Message(Object):
    """A message of the chat."""

    noun = "message"
    unserved = MESSAGES

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Annotated[ListOf[TextPart], BeforeValidator(parts_of)]
    name: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    """Older form of `tool_calls`."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Newer name of `reasoning_content`."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, given: Any) -> Any:
        """Answers that come back as messages have fields such as `refusal: null`, `annotations: []`."""
        if not isinstance(given, dict):
            return given
        fields = {name: value for name, value in given.items() if value not in (None, [])}
        # a call of a tool has no text, and a tool may return none
        may_be_empty = fields.get("role") in ("assistant", "tool", "function")
        return {"content": "", **fields} if may_be_empty else fields

    def arguments(self) -> Iterator[str]:
        """Yield the arguments of called functions that are texts."""
        for function in (
            *(each.get("function") for each in self.tool_calls or ()),
            self.function_call,
        ):
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield function["arguments"]

    def _content(self) -> str | list[dict[str, str]]:
        """Return the text, or its parts where one names languages."""
        if any(part.languages for part in self.content):
            return [{"type": "text", **part.languages, "text": part.text} for part in self.content]
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read, which is vLLM's."""
        calls = [_call(each) for each in self.tool_calls or ()]
        if self.function_call:
            calls.append({"type": "function", "function": _parsed(self.function_call)})
        reasoning = self.reasoning_content or self.reasoning
        others = {
            "name": self.name,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
        }
        return {
            "role": "tool" if self.role == "function" else self.role,
            "content": self._content(),
            **{name: value for name, value in others.items() if value},
        }


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates read.

    Raises:
        InvalidRequest: the arguments of called functions are too long.
    """
    size = sum(len(each) for message in messages for each in message.arguments())
    if size > MAX_ARGUMENT_CHARACTERS:
        raise InvalidRequest(
            f"the arguments of tool_calls have {size} characters; allowed: up to {MAX_ARGUMENT_CHARACTERS} in all"
            " messages, so leave old calls out"
        )
    return [message.for_template() for message in messages]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return {**call, "function": _parsed(function)} if isinstance(function, dict) else call


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    """Return a called function with its arguments as an object, which templates expect."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return {**function, "arguments": json.loads(arguments or "{}")}
    except (ValueError, RecursionError):
        # a model has written it
        return function


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
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    functions: Any = None
    """Older form of `tools`, which is not called."""
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls, the default."""
    verbosity: Any = None
    """Ignored: no chat template reads it."""
    chat_template: str | None = None
    """Name of one of the checkpoint's templates."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    """Ignored: `chat_template_kwargs` sets what the chat template knows of it, such as `enable_thinking`."""
    # vLLM's
    include_reasoning: bool | None = None
    """Whether the answer has its reasoning, the default."""
    echo: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    return_prompt_text: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_older_tools(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            return given
        if given.get("function_call") not in (None, "", "none", "auto"):
            raise refused_field("function_call", "is not supported; write tool_choice and tools")
        if given.get("functions") and given.get("function_call") != "none":
            if info.context is None:
                raise refused_field("functions", "is not supported; write tools")
            info.context.add("functions")
        return given

    def tool_request(self) -> ToolRequest:
        """Return the tools that the answer may call.

        Raises:
            InvalidRequest: see `ToolRequest.of`.
        """
        functions = [each.function for each in self.tools or ()]
        is_parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return ToolRequest.of(functions, None, self.tool_choice.function.name, is_parallel)
        return ToolRequest.of(functions, self.tool_choice, None, is_parallel)


async def chat_completions(gateway: Gateway, body: ChatBody) -> Response:
    """Answer the last message of a chat."""
    tools, sampling = body.tool_request(), _chat_sampling(body, gateway.settings)
    messages = for_template(body.messages)
    model = await gateway.models.get(body.model)
    plan = await plan_tools(
        gateway.forms,
        model.name,
        model.client,
        tools,
        sampling,
        has_reasoning=body.include_reasoning is not False,
    )
    kind, field = "chat.completion", "message"
    if body.stream:
        kind, field = "chat.completion.chunk", "delta"
    make_choice = partial(_chat_choice, field, plan.reader, body.logprobs, body.top_logprobs or 0)
    with plan.naming_schemas():
        response = await _answer(
            gateway, body, model, [messages], plan.sampling, ("chatcmpl", kind), make_choice
        )
    response.headers.update(plan.headers)
    if body.functions and body.function_call != "none":
        response.headers.update(NO_TOOLS)
    return response


def _chat_sampling(body: ChatBody, settings: GatewaySettings) -> dict[str, Any]:
    """Return the sampling parameters of a chat.

    Raises:
        InvalidRequest: `top_logprobs` without `logprobs`, or fields that contradict each other.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true")
    given = body.max_completion_tokens, body.max_tokens, settings.chat_max_tokens
    sampling = body.sampling()
    sampling["max_tokens"] = next(each for each in given if each is not None)
    variables = template_variables(
        body.chat_template, body.chat_template_kwargs, strict=settings.strict
    )
    if variables:
        sampling["chat_template_kwargs"] = variables
    return sampling | ({"logprobs": body.top_logprobs or 0} if body.logprobs else {})


def template_variables(
    name: str | None, variables: dict[str, Any] | None, *, strict: bool
) -> dict[str, Any] | None:
    """Return the variables of the chat template, as the server takes them.

    Args:
        strict: whether those that the template does not read are refused; vLLM ignores them.
    """
    options: dict[str, Any] = {} if name is None else {"chat_template": name}
    if variables and not strict:
        options["ignore_unread"] = True
    return {**(variables or {}), **options} or None


def _chat_choice(
    field: str,
    reader: ChatReader | None,
    has_logprobs: bool,
    top: int,
    index: int,
    part: Generation | GeneratedPart,
    sent: int | None,
) -> dict[str, Any]:
    """Return a choice with its text in `field`; the first part has the role."""
    role = {"role": "assistant"} if sent is None else {}
    said: dict[str, Any] = {"content": part.text}
    ending = _ending(part, has_logprobs, top)
    if reader is not None:
        said, ending["finish_reason"] = reader.fields(index, part, is_whole=field == "message")
        said = {"content": "", **said} if sent is None else said
    return {"index": index, field: {**role, **said}, **ending}


def _ending(part: Generation | GeneratedPart, has_logprobs: bool, top: int) -> dict[str, Any]:
    """Return the end of a choice, with `top` tokens in each of its `top_logprobs`."""
    content = [
        {
            **_token(chosen),
            "top_logprobs": [_token(each) for each in _most_likely(chosen, found, top)],
        }
        for chosen, found in reported_tokens(part)
        if has_logprobs
    ]
    return {
        "logprobs": {"content": content} if content else None,
        "finish_reason": part.finish_reason,
    }


def _most_likely(
    chosen: ReportedToken, found: list[ReportedToken], top: int
) -> list[ReportedToken]:
    """Return `top` tokens; the chosen one is the last if it is less likely."""
    tokens = found[:top]
    return tokens if chosen in tokens else [*tokens[:-1], chosen][:top]


def _token(token: ReportedToken) -> dict[str, Any]:
    encoded = None if token.utf8 is None else [*token.utf8]
    return {"token": token.text, "logprob": token.logprob, "bytes": encoded}
