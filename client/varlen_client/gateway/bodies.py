"""What the bodies of requests and answers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    ConfigDict,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import to_json
from starlette.responses import Response

from varlen_client.errors import InvalidRequest

# As many as OpenAI takes.
MAX_INPUTS = 2048
# Characters of a query, counted once for each document.
_MAX_REPEATED = 1 << 26

Texts: TypeAlias = StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]


class Fields(BaseModel):
    """An object whose unknown fields are refused, and whose nulls are left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


_Fields = TypeVar("_Fields", bound=Fields)


class RequestBody(Fields):
    """What the bodies of requests have."""

    model: str | None = None
    """The server's name of the model; by default the name in `?model=`, the gateway's, or the only ready one."""


class OpenAIBody(RequestBody):
    """A body of OpenAI's interface, with fields that change no answer."""

    user: str | None = None
    """Ignored."""
    metadata: dict[str, Any] | None = None
    """Ignored."""


def checked(form: type[_Fields], body: Any) -> _Fields:
    """Return a body in this form.

    Raises:
        RequestValidationError: it has another form.
    """
    try:
        return form.model_validate(body)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(errors, body=body) from None


def rows_of(texts: Texts, name: str) -> list[str] | list[list[int]]:
    """Return one text, or one list of token ids, per row.

    Raises:
        InvalidRequest: there is no row, or more than MAX_INPUTS.
    """
    is_one = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
    rows = [texts] if is_one else texts
    if not 1 <= len(rows) <= MAX_INPUTS:
        raise InvalidRequest(f"{name} has {len(rows)} rows; allowed: 1 to {MAX_INPUTS}")
    return cast("list[str] | list[list[int]]", rows)


def check_repeated(name: str, text: str, times: int) -> None:
    """Raise InvalidRequest if a text that stands before each document would fill the memory."""
    if len(text) * times > _MAX_REPEATED:
        raise InvalidRequest(
            f"{name} has {len(text)} characters for {times} documents; allowed: {_MAX_REPEATED} in all,"
            " so send fewer documents at once"
        )


def usage(prompt_tokens: int, completion_tokens: int | None = None) -> dict[str, int]:
    """Return the object `usage` of an answer; embeddings have no completion."""
    total = prompt_tokens + (completion_tokens or 0)
    counts = {"prompt_tokens": prompt_tokens, "total_tokens": total}
    return (
        counts if completion_tokens is None else counts | {"completion_tokens": completion_tokens}
    )


def json_bytes(content: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """Return an answer as JSON, which has no NaN and no infinity: they are null."""
    return to_json(content, inf_nan_mode="null")


def json_response(content: Mapping[str, Any] | Sequence[Any]) -> Response:
    """Return a response with an answer as JSON."""
    return Response(json_bytes(content), media_type="application/json")
