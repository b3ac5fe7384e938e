"""Edge cases of completions and chats: log probabilities, streams, tools, and fields of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.edges.case import Edge, Gives, Holds, Refused, Right, Same

_COMPLETION, _CHAT = "/v1/completions", "/v1/chat/completions"
_PROMPT: Mapping[str, Any] = {"prompt": "The list of", "temperature": 0, "max_tokens": 4}
_HELLO = {"role": "user", "content": "The list of"}
_MESSAGES: Mapping[str, Any] = {"messages": [_HELLO], "temperature": 0, "max_tokens": 4}
# The tokens of the model are parts of these characters.
_TEXT = "😀你é"
_OPENAI = "OpenAI API reference"
_VLLM = "vLLM 0.11"


def _choices(answer: Any) -> list[Any]:
    """Return the choices of an answer, or of the events of a stream."""
    objects = answer if isinstance(answer, list) else [answer]
    return [choice for each in objects for choice in each["choices"]]


def _has_named_alternatives(answer: Any) -> None:
    for choice in _choices(answer):
        found = choice["logprobs"]
        for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
            # the chosen one may be a sixth
            assert 5 <= len(top) <= 6
            assert token in top
    assert any(
        "bytes:" in each for choice in _choices(answer) for each in choice["logprobs"]["tokens"]
    )


def _has_the_bytes_of_its_text(answer: Any) -> None:
    tokens = [token for choice in _choices(answer) for token in choice["logprobs"]["content"]]
    texts = [choice.get("delta", choice.get("message"))["content"] for choice in _choices(answer)]
    assert b"".join(bytes(token["bytes"]) for token in tokens) == "".join(texts).encode()
    assert "".join(texts) == _TEXT
    for token in tokens:
        assert len(token["top_logprobs"]) == 5
        assert token["bytes"] in [each["bytes"] for each in token["top_logprobs"]]


def _ends_with_usage(events: Any) -> None:
    *chunks, last = events
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


def _has_two_answers(events: Any) -> None:
    ends = [choice["index"] for choice in _choices(events) if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]


def _has_the_best_of_two(answer: Any) -> None:
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] > 4


def _edge(name: str, body: Mapping[str, Any], right: Right, source: str, **others: Any) -> Edge:
    """Return a case of a completion, or of a chat if the body has messages."""
    route = _CHAT if "messages" in body else _COMPLETION
    return Edge(
        name=name, route=route, body=body, right=right, source=source, role="writer", **others
    )


def _chat_of(*messages: Mapping[str, Any]) -> dict[str, Any]:
    return {**_MESSAGES, "messages": [*messages]}


_LOGPROBS = tuple(
    _edge(
        f"{what}{', streamed' * streams}",
        {**body, "structured_outputs": {"choice": [_TEXT]}, "max_tokens": 64, "stream": streams},
        Holds(holds),
        "the tokens of a byte-level tokenizer are bytes (Radford et al. 2019)",
        needs_weights=True,
    )
    for streams in (False, True)
    for what, body, holds in (
        (
            "five alternatives are five entries, parts of characters too",
            {**_PROMPT, "logprobs": 5},
            _has_named_alternatives,
        ),
        (
            "the bytes of tokens are together the UTF-8 of the answer",
            {**_MESSAGES, "logprobs": True, "top_logprobs": 5},
            _has_the_bytes_of_its_text,
        ),
    )
)
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

EDGES = (
    *_LOGPROBS,
    _edge(
        "empty stop strings stop nothing",
        {**_PROMPT, "stop": [""]},
        Same(_PROMPT),
        "clients with an empty setting",
    ),
    _edge(
        "options of a stream need a stream",
        {**_PROMPT, "stream_options": {"include_usage": True}},
        Refused(400, ("stream_options", "stream: true")),
        f"{_OPENAI}, stream_options",
    ),
    _edge(
        "a stream that ends with its usage has null before",
        {**_MESSAGES, "stream": True, "stream_options": {"include_usage": True}},
        Holds(_ends_with_usage),
        f"{_OPENAI}, stream_options",
    ),
    _edge(
        "a stream has the answers to two prompts",
        {**_PROMPT, "prompt": ["The list of", "Return the"], "stream": True},
        Holds(_has_two_answers),
        f"{_OPENAI}, completions",
    ),
    _edge(
        "the best of two samples is sent",
        {**_PROMPT, "temperature": 1, "seed": 1, "best_of": 2, "ignore_eos": True},
        Holds(_has_the_best_of_two),
        f"{_OPENAI}, completions",
    ),
    _edge(
        "tools without a forced choice are answered with text",
        {**_MESSAGES, "tools": _TOOLS, "tool_choice": "auto"},
        Same(_MESSAGES),
        f"{_OPENAI}, chat: a model may answer with text",
    ),
    _edge(
        "a forced choice of tools is refused",
        {**_MESSAGES, "tools": _TOOLS, "tool_choice": "required"},
        Refused(400, ("tool_choice", "reads no tools")),
        f"{_OPENAI}, chat: required calls a tool",
    ),
    _edge(
        "calls of tools in the history are no text of their own",
        _chat_of(
            _HELLO,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}]},
        ),
        Same(
            _chat_of(_HELLO, {"role": "assistant", "content": ""}, {"role": "user", "content": "7"})
        ),
        f"{_VLLM}, chat templates",
    ),
    _edge(
        "a content may be a list of texts, with marks for caches",
        _chat_of(
            {
                "role": "user",
                "content": [
                    "The ",
                    {"type": "text", "text": "list of", "cache_control": {"type": "ephemeral"}},
                ],
            }
        ),
        Same(_MESSAGES),
        f"{_VLLM}, ChatCompletionContentPartParam; Anthropic's cache_control",
    ),
    _edge(
        "fields of CodeCompanion, Qwen, OpenRouter and LobeChat change nothing",
        {
            **_chat_of({**_HELLO, "id": 5, "opts": {"visible": True}}),
            "enable_thinking": False,
            "provider": {"order": ["a"]},
            "transforms": [],
            "models": ["a"],
            "route": "fallback",
            "plugins": [],
        },
        Same(_MESSAGES),
        f"{_VLLM}, unknown fields",
    ),
    _edge(
        "numbers may be texts, and null is no value",
        {**_MESSAGES, "n": "1", "temperature": "0", "seed": None, "max_tokens": "4", "stop": None},
        Same(_MESSAGES),
        f"{_VLLM}, pydantic",
    ),
    _edge(
        "a chat has its log probabilities for 1",
        {**_MESSAGES, "logprobs": 1},
        Same({**_MESSAGES, "logprobs": True}),
        f"{_VLLM}, pydantic",
    ),
    _edge(
        "images are refused by name",
        _chat_of({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}),
        Refused(400, ("image_url", "messages are texts")),
        f"{_VLLM}: a model of texts",
    ),
    _edge(
        "answers in sound are refused by name",
        {**_MESSAGES, "modalities": ["text", "audio"], "audio": {"voice": "alloy"}},
        Refused(400, ("is not supported: answers are text",)),
        f"{_OPENAI}, chat: a model of texts",
    ),
    _edge(
        "a suffix is refused by name",
        {**_PROMPT, "suffix": "end"},
        Refused(400, ("suffix",)),
        f"{_VLLM}: suffix is not currently supported",
    ),
    _edge(
        "an empty suffix asks for nothing",
        {**_PROMPT, "suffix": ""},
        Gives({"object": "text_completion"}),
        f"{_OPENAI}, completions",
    ),
)
