"""Generated answers in OpenAI's form: whole, or as an event stream of chunks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from varlen_client.errors import VarlenClientError
from varlen_client.gateway.errors import client_error_body
from varlen_client.gateway.json_io import Rows, json_bytes, usage_of
from varlen_client.gateway.metrics import GatewayMetrics
from varlen_client.generation import GeneratedPart, Generation

# The next part of each answer to a prompt.
Parts: TypeAlias = AsyncGenerator[list[GeneratedPart], None]
# The same of several prompts, with the index of the first answer.
NumberedParts: TypeAlias = AsyncGenerator[tuple[int, list[GeneratedPart]], None]
StreamUsage: TypeAlias = Literal["none", "last", "all"]
# Returns a choice for an index, a part of its answer, and the length of the text before the part; None is the first.
MakeChoice: TypeAlias = Callable[[int, Generation | GeneratedPart, int | None], dict[str, Any]]

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Head:
    """Fields that begin every object of an answer."""

    kind: str
    model: str
    id: str
    created: int

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, request_id: str | None = None) -> Head:
        """Return the head of a new answer; without a `request_id`, its id is random."""
        return cls(kind, model, f"{prefix}-{request_id or uuid.uuid4().hex}", int(time.time()))

    def object(self, choices: Sequence[dict[str, Any]] | Rows, **others: Any) -> dict[str, Any]:
        """Return an object of the answer with these choices."""
        fields = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**fields, "choices": choices, **others}


def whole_answer(
    head: Head,
    answers: Sequence[Sequence[Generation]],
    n: int,
    make_choice: MakeChoice,
    metrics: GatewayMetrics,
) -> dict[str, Any]:
    """Return the answer to several prompts: the best `n` samples of each.

    All samples count as usage.
    """
    prompt_tokens = sum(each[0].num_prompt_tokens for each in answers)
    completion_tokens = sum(len(sample.token_ids) for each in answers for sample in each)
    metrics.count_tokens(prompt_tokens, completion_tokens)
    samples = [sample for each in answers for sample in _best(each, n)]
    choices = Rows(make_choice(index, sample, None) for index, sample in enumerate(samples))
    return head.object(choices, **usage_of(prompt_tokens, completion_tokens))


def _best(samples: Sequence[Generation], n: int) -> Sequence[Generation]:
    """Return `n` samples with the highest log probability per token."""
    if len(samples) <= n:
        return samples

    def mean(sample: Generation) -> float:
        chosen = zip(sample.token_ids, sample.logprobs, strict=True)
        return sum(logprobs[token] for token, logprobs in chosen) / max(len(sample.token_ids), 1)

    return sorted(samples, key=mean, reverse=True)[:n]


@dataclass(frozen=True, slots=True)
class ReportedToken:
    r"""A token whose log probability is reported.

    Attributes:
        text: its text; OpenAI's form `bytes:\xe2\x82` for a part of a character.
        utf8: UTF-8 that it adds to the answer; None where an older server does not say it.
    """

    token_id: int
    text: str
    utf8: bytes | None
    logprob: float


def reported_tokens(
    part: Generation | GeneratedPart,
) -> Iterator[tuple[ReportedToken, list[ReportedToken]]]:
    """Yield each token of an answer, and all reported ones, the most likely first."""
    for at, (token_id, logprobs) in enumerate(zip(part.token_ids, part.logprobs, strict=False)):
        texts, utf8 = part.token_texts[at], part.token_bytes[at] if part.token_bytes else {}
        found = [
            _reported(each, texts[each], utf8.get(each), logprob)
            for each, logprob in sorted(logprobs.items(), key=lambda item: -item[1])
        ]
        yield next(each for each in found if each.token_id == token_id), found


def _reported(token_id: int, text: str, utf8: bytes | None, logprob: float) -> ReportedToken:
    if utf8 is None and "\N{REPLACEMENT CHARACTER}" not in text:
        utf8 = text.encode()
    if utf8:
        try:
            text = utf8.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)
    return ReportedToken(token_id, text, utf8, logprob)


class Frames(Protocol):
    """Makes the events of a stream.

    Attributes:
        done: end of the stream, after the last event.
    """

    done: bytes

    def of(self, first: int, parts: Sequence[GeneratedPart]) -> Iterator[dict[str, Any]]:
        """Yield the events of the next parts of answers; the first has the index `first`."""

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield the events that follow the answers."""

    def failed(self, error: VarlenClientError) -> Iterator[dict[str, Any]]:
        """Yield the events of a failure, which ends the stream."""

    def frame(self, event: dict[str, Any]) -> bytes:
        """Return an event as the stream has it."""


@dataclass(slots=True)
class Chunks(Frames):
    """Makes the chunks of a stream.

    Attributes:
        usage: chunks that have the usage: the last one beside a null in the others, or all.
    """

    head: Head
    make_choice: MakeChoice
    usage: StreamUsage
    metrics: GatewayMetrics
    _sent_characters: dict[int, int] = field(default_factory=dict)
    _sent_tokens: dict[int, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    # of each prompt, by the index of its first answer
    _prompt_tokens: dict[int, int] = field(default_factory=dict)

    done = b"data: [DONE]\n\n"

    def failed(self, error: VarlenClientError) -> Iterator[dict[str, Any]]:
        """Yield the error."""
        yield client_error_body(error)[1]

    def frame(self, event: dict[str, Any]) -> bytes:
        """Return a chunk as the stream has it."""
        return b"data: " + json_bytes(event) + b"\n\n"

    def of(self, first: int, parts: Sequence[GeneratedPart]) -> Iterator[dict[str, Any]]:
        """Yield a chunk for each answer that goes on; the first has the index `first`."""
        for index, part in enumerate(parts, start=first):
            if index in self._ended:
                continue
            if part.finish_reason is not None:
                self._ended.add(index)
            sent = self._sent_characters.get(index)
            self._sent_characters[index] = (sent or 0) + len(part.text)
            self._prompt_tokens[first] = part.num_prompt_tokens
            tokens = self._sent_tokens.get(index, 0) + len(part.token_ids)
            self._sent_tokens[index] = tokens
            counts: dict[str, Any] = {} if self.usage == "none" else {"usage": None}
            if self.usage == "all":
                counts = usage_of(part.num_prompt_tokens, tokens)
            yield self.head.object([self.make_choice(index, part, sent)], **counts)

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield what follows the answers."""
        prompt_tokens = sum(self._prompt_tokens.values())
        completion_tokens = sum(self._sent_tokens.values())
        self.metrics.count_tokens(prompt_tokens, completion_tokens)
        if self.usage != "none":
            yield self.head.object([], **usage_of(prompt_tokens, completion_tokens))


async def numbered(streams: Sequence[Parts], n: int) -> NumberedParts:
    """Yield parts of several prompts as they come, with the index of the first answer.

    Closes the streams when it ends in any way. A stream is read on once its part is taken, so a slow reader gets fewer
    and longer parts.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for parts in stream:
                yield 0, parts
        return
    waiting = {asyncio.ensure_future(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = waiting.pop(task)
                if (found := task.result()) is not None:
                    yield at * n, found
                    waiting[asyncio.ensure_future(_next(streams[at]))] = at
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for each in streams:
            await each.aclose()


async def _next(stream: Parts) -> list[GeneratedPart] | None:
    """Return the next parts; None after the last."""
    return await anext(stream, None)


class EventStream(StreamingResponse):
    """A stream of server-sent events, which closes the parts when it ends in any way."""

    _parts: NumberedParts
    _first: tuple[int, list[GeneratedPart]]
    _chunks: Frames

    @classmethod
    async def begin(cls, parts: NumberedParts, chunks: Frames) -> EventStream:
        """Return the stream once its first part is there; errors before have a status."""
        stream = cls((), headers=_HEADERS, media_type="text/event-stream")
        stream._parts, stream._first, stream._chunks = parts, await anext(parts), chunks
        return stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with aclosing(self._parts):
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            async for body in self._events():
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        chunks = self._chunks
        try:
            for chunk in chunks.of(*self._first):
                yield chunks.frame(chunk)
            async for parts in self._parts:
                for chunk in chunks.of(*parts):
                    yield chunks.frame(chunk)
        except VarlenClientError as error:
            # the status has been sent
            for chunk in chunks.failed(error):
                yield chunks.frame(chunk)
            return
        for chunk in chunks.last():
            yield chunks.frame(chunk)
        if chunks.done:
            yield chunks.done
