"""OpenAI's `/v1/completions`."""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.answers import (
    Chunks,
    EventStream,
    Head,
    ReportedToken,
    numbered,
    reported_tokens,
    whole_answer,
)
from varlen_client.gateway.bodies import Texts, rows_of
from varlen_client.gateway.json_writing import json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.sampling import SamplingBody
from varlen_client.gateway.unserved_fields import COMPLETIONS
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
    prompts = rows_of(body.prompt, "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompts)} prompts; allowed: 1 to {MAX_PROMPTS}")
    sampling = _sampling(body)
    make_choice = partial(_choice, _echoed(body, prompts), body.n, body.logprobs is not None)
    model = await gateway.models.get(body.model)
    head = Head.new("cmpl", "text_completion", model.name, body.request_id)
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
