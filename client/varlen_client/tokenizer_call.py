"""Calls that run no model: tokens of texts and chats, texts of token ids, adapters.

An answer is a JSON object for each row, under the name of any output of the model. Models that generate take one prompt
in a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from varlen_client.calls import RequestSender, RowCall
from varlen_client.errors import InvalidRequest, ServerError
from varlen_client.generation import Messages, OperationRequest, json_text
from varlen_client.tasks.row_task import CallOptions, InputType, Options, RowOptions, parameters_of
from varlen_client.wire import InferRequest, Parameters, Rows, TokenIds, read_inputs

# What is tokenized: texts, or chats.
Tokenizable: TypeAlias = Sequence[str] | Sequence[Messages]
# The JSON object of a row.
_Object: TypeAlias = Mapping[str, Any]
_T = TypeVar("_T")
_Result = TypeVar("_Result")
_GENERATED = "text_output"


class TokenizeOptions(RowOptions, total=False):
    """Options of tokenization.

    add_special_tokens: add special tokens; by default to texts, not to chats, whose template has them.
    chat_template_kwargs: variables of the chat template, for chats.
    """

    prompt_name: str | None
    input_type: InputType | None
    add_special_tokens: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


class DetokenizeOptions(CallOptions, total=False):
    """Options of detokenization.

    skip_special_tokens: leave special tokens out, the default.
    """

    skip_special_tokens: bool | None


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text.

    Attributes:
        tokens: tokens as the vocabulary has them, such as "##ing" or "Ġcat".
        special: whether the tokenizer added the token.
        offsets: first character of each token, and the first one behind it, in `prompt` and the text behind it.
        prompt: prompt of the checkpoint that is put before the text; often empty.
        max_tokens: length of the model's longest sequence, in tokens.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    offsets: tuple[tuple[int, int], ...]
    prompt: str
    max_tokens: int


class TokenizerSender(RequestSender):
    """Sends texts to the tokenizer of one model."""

    async def tokenize(self, inputs: Tokenizable, options: Options) -> list[TokenizedText]:
        """Return the tokens of each text or chat."""
        is_chat = not isinstance(inputs, str) and any(map(_is_chat, inputs))
        rows = Rows(tuple(map(_chat, inputs))) if is_chat else read_inputs(inputs)  # type: ignore[arg-type]
        if rows.ids:
            raise InvalidRequest("got token ids; tokenize takes texts or chats")
        parameters = parameters_of("tokenize", TokenizeOptions, options)
        json_text("the parameters", parameters)
        if "chat_template_kwargs" in parameters and not is_chat:
            raise InvalidRequest("got chat_template_kwargs without chats; leave it out")
        found = await self._send("tokenize", rows, parameters, options, is_chat=is_chat)
        return [await _after_others(_tokenized, each) for each in found]

    async def detokenize(self, inputs: Sequence[TokenIds], options: Options) -> list[str]:
        """Return the text of each row of token ids."""
        rows = read_inputs(inputs)
        if rows.texts:
            raise InvalidRequest("got texts; detokenize takes lists of token ids")
        texts = Rows(tuple((json.dumps(ids.tolist()).encode(),) for ids in rows.ids))
        parameters = parameters_of("detokenize", DetokenizeOptions, options)
        found = await self._send("detokenize", texts, parameters, options)
        return [_field(each, "text") for each in found]

    async def adapters(self, timeout: float | None) -> dict[str, str]:
        """Return why each adapter is refused, by name; empty for one that is served."""
        # some text: the server ignores it
        [found] = await self._send("adapters", Rows(((b"a",),)), {}, {"timeout": timeout})
        adapters: dict[str, str] = _field(found, "adapters")
        return adapters

    async def _send(
        self,
        operation: str,
        rows: Rows,
        parameters: Parameters,
        options: Options,
        *,
        is_chat: bool = False,
    ) -> list[_Object]:
        """Return the JSON object of each row."""
        parameters = {"operation": operation, **parameters}
        timeout, on_progress = options.get("timeout"), options.get("on_progress")
        call = RowCall(operation, len(rows), timeout=timeout, on_progress=on_progress)

        async def send_all() -> list[_Object]:
            info = await self._session.model_info(call.deadline)
            # of outputs that are arrays any will do, and this one exists
            output = next(iter(info.outputs))

            async def ask(request: OperationRequest) -> list[_Object]:
                [response] = await self._session.all_responses(info, request, call.deadline)
                return await _objects(response.get(_GENERATED, ()), 1)

            async def infer(request: InferRequest) -> list[_Object]:
                found = (await self._session.infer(info, request, call.deadline)).get(output)
                if not isinstance(found, np.ndarray) or found.dtype != np.object_:
                    raise ServerError(
                        f"{output} has no texts; the server is older than this client"
                    )
                return await _objects(found.ravel().tolist(), len(request.rows))

            if info.generates:
                name: Literal["messages", "text_input"] = "messages" if is_chat else "text_input"
                prompts = (
                    (
                        range(row, row + 1),
                        OperationRequest((name, text.decode()), parameters, stream=False),
                    )
                    for row, (text,) in enumerate(rows.texts)
                )
                parts = await call.send_all(prompts, ask, concurrency=self._concurrency)
            elif is_chat:
                raise InvalidRequest(
                    f"model {info.name!r} does not generate; chats need a model that does"
                )
            else:
                texts = rows
                if info.requires_pairs:
                    texts = Rows(tuple((text, b"") for (text,) in rows.texts))
                requests = (
                    (each, InferRequest(each, texts.tensors(each), (output,), parameters))
                    for each in texts.split(self._request_rows(info))
                )
                parts = await call.send_all(requests, infer, concurrency=self._concurrency)
            return [each for part in parts for each in part]

        return await call.within_timeout(send_all())


def _is_chat(row: object) -> bool:
    # the characters of a text are texts
    if isinstance(row, str) or not isinstance(row, Sequence):
        return False
    return any(isinstance(each, Mapping) for each in row)


def _chat(row: Any) -> tuple[bytes]:
    """Return the JSON text of chat messages.

    Raises:
        InvalidRequest: JSON has no form for them.
    """
    if not _is_chat(row):
        raise InvalidRequest(
            "some rows are chats and others are not; send them in calls of their own"
        )
    return (json_text("the messages", list(row)).encode(),)


async def _after_others(read: Callable[[_T], _Result], given: _T) -> _Result:
    """Return what is read of a row, which may be large, after other tasks ran."""
    await asyncio.sleep(0)
    return read(given)


async def _objects(texts: Sequence[str | bytes], rows: int) -> list[_Object]:
    """Return the JSON object of each row.

    Raises:
        ServerError: a row has none.
    """
    try:
        found = [await _after_others(json.loads, text) for text in texts]
        assert len(found) == rows
        assert all(isinstance(each, dict) for each in found)
    except (ValueError, AssertionError) as error:
        raise ServerError(f"the response cannot be read: {error!r}") from error
    return found


def _tokenized(found: _Object) -> TokenizedText:
    return TokenizedText(
        token_ids=tuple(_field(found, "token_ids")),
        tokens=tuple(_field(found, "tokens")),
        special=tuple(_field(found, "special")),
        offsets=tuple(map(tuple, _field(found, "offsets"))),
        prompt=_field(found, "prompt"),
        max_tokens=_field(found, "max_tokens"),
    )


def _field(found: _Object, name: str) -> Any:
    if name not in found:
        raise ServerError(f"the response has no {name}")
    return found[name]
