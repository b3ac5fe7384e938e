"""The tokenizer: `/tokenize` of TEI and vLLM, `/decode` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias

from pydantic import StrictBool, StrictStr
from starlette.responses import Response

from varlen_client.calls import Tokenizable, TokenizedText
from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import Ids, ListOf, RequestBody, RowsOfIds, check_rows, rows_of
from varlen_client.gateway.generation import Messages, for_template, template_variables
from varlen_client.gateway.json_io import Blocks, Rows, json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.unserved_fields import TOKENIZATION

# The answer has many times the bytes of a text.
MAX_BYTES_OF_TEXT = 1 << 17
MAX_BYTES_OF_TEXTS = 1 << 20
# Tokens of an answer that are written in one piece.
_TOKENS_AT_ONCE = 1 << 10

# TEI's object of a token.
_Token: TypeAlias = dict[str, Any]


class TokenizeBody(RequestBody):
    """A request to `/tokenize`: `inputs` of TEI, or `prompt` or `messages` of vLLM."""

    unserved = TOKENIZATION

    inputs: StrictStr | ListOf[StrictStr] | None = None
    prompt: StrictStr | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool | None = None
    """By default true, but false for `messages`."""
    prompt_name: StrictStr | None = None
    """Of TEI."""
    return_token_strs: StrictBool | None = None
    """vLLM's."""
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def texts(self) -> Tokenizable:
        """Return what is tokenized.

        Raises:
            InvalidRequest: there is not exactly one of the three, more than MAX_INPUTS texts, or a field of another.
        """
        names = [name for name in ("inputs", "prompt", "messages") if self._has(name)]
        if len(names) != 1:
            given = " and ".join(names) or "no text"
            raise InvalidRequest(f"the body has {given}; send one of inputs, prompt, messages")
        [name] = names
        of_one = {
            "prompt_name": "inputs",
            "add_generation_prompt": "messages",
            "continue_final_message": "messages",
            "chat_template": "messages",
            "chat_template_kwargs": "messages",
        }
        wrong = [each for each, owner in of_one.items() if self._has(each) and owner != name]
        if name == "inputs" and self.return_token_strs:
            wrong.append("return_token_strs")
        if wrong:
            raise InvalidRequest(f"{wrong[0]} is not for {name}; leave it out")
        if self.messages is not None:
            return [for_template(self.messages)]
        if self.prompt is not None:
            return [self.prompt]
        assert self.inputs is not None
        return rows_of(self.inputs, "inputs")  # type: ignore[return-value]  # they are texts

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None


class DetokenizeBody(RequestBody):
    """A request to `/detokenize`."""

    ids_field = "tokens"

    tokens: Ids


class DecodeBody(RequestBody):
    """A request to `/decode`."""

    ids_field = "ids"

    ids: RowsOfIds
    skip_special_tokens: StrictBool = True


async def tokenize(gateway: Gateway, body: TokenizeBody) -> Response:
    """Return the tokens of each of `inputs`, or of vLLM's `prompt` or `messages`."""
    texts = body.texts()
    _check_bytes(texts)
    model = await gateway.models.get(body.model)
    variables = template_variables(
        body.chat_template, body.chat_template_kwargs, strict=gateway.settings.strict
    )
    found = await model.client.tokenize(
        texts,
        timeout=gateway.settings.timeout_seconds,
        add_special_tokens=body.add_special_tokens,
        prompt_name=body.prompt_name,
        chat_template_kwargs=variables,
    )
    if body.inputs is not None:
        rows = zip(texts, found, strict=True)
        return json_response(Rows(Blocks(_blocks(_tokens(str(text), each))) for text, each in rows))
    [only] = found
    answer: dict[str, Any] = {
        "count": len(only.token_ids),
        "max_model_len": only.max_tokens,
        "tokens": only.token_ids,
        "token_strs": only.tokens if body.return_token_strs else None,
    }
    return json_response(answer)


async def detokenize(gateway: Gateway, body: DetokenizeBody) -> Response:
    """Return the text of tokens, special ones included."""
    texts = await _decoded(gateway, body.model, [body.tokens], skip_special_tokens=False)
    return json_response({"prompt": texts[0]})


async def decode(gateway: Gateway, body: DecodeBody) -> Response:
    """Return the text of each list of token ids."""
    is_one = not body.ids or isinstance(body.ids[0], int)
    # too many rows are not checked before here
    rows: list[list[int]] = [body.ids] if is_one else body.ids  # type: ignore[assignment,list-item]
    check_rows("ids", rows)
    skip = body.skip_special_tokens
    return json_response(await _decoded(gateway, body.model, rows, skip_special_tokens=skip))


async def _decoded(
    gateway: Gateway,
    name: str | None,
    rows: Sequence[Sequence[int]],
    *,
    skip_special_tokens: bool,
) -> list[str]:
    """Return the text of each row."""
    model = await gateway.models.get(name)
    timeout = gateway.settings.timeout_seconds
    return await model.client.detokenize(
        rows, timeout=timeout, skip_special_tokens=skip_special_tokens
    )


def _check_bytes(texts: Tokenizable) -> None:
    """Raise InvalidRequest if the tokens of texts or chats would take long to read."""
    sizes = [
        len(row.encode(errors="replace"))
        if isinstance(row, str)
        else sum(len(str(each["content"]).encode(errors="replace")) for each in row)
        for row in texts
    ]
    if max(sizes) > MAX_BYTES_OF_TEXT or sum(sizes) > MAX_BYTES_OF_TEXTS:
        raise InvalidRequest(
            f"the longest text has {max(sizes)} bytes, and all have {sum(sizes)}; allowed: up to"
            f" {MAX_BYTES_OF_TEXT} in a text and {MAX_BYTES_OF_TEXTS} in all, so send them in parts"
        )


def _blocks(tokens: Iterator[_Token]) -> Iterator[list[_Token]]:
    """Yield tokens, some at a time."""
    while block := list(islice(tokens, _TOKENS_AT_ONCE)):
        yield block


def _tokens(text: str, found: TokenizedText) -> Iterator[_Token]:
    """Yield TEI's objects of the tokens of a text.

    A special token has no place in the text.
    """
    whole = found.prompt + text
    for token_id, token, special, (start, stop) in zip(
        found.token_ids, found.tokens, found.special, found.offsets, strict=True
    ):
        if special:
            place = {"text": token, "special": True, "start": None, "stop": None}
        else:
            place = {"text": whole[start:stop], "special": False, "start": start, "stop": stop}
        yield {"id": token_id, **place}
