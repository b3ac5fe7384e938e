"""What the bodies of requests and answers share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, cast

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from varlen_client.errors import InvalidRequest

_Fields = TypeVar("_Fields", bound="Fields")
_Item = TypeVar("_Item")

# As many as OpenAI takes.
MAX_INPUTS = 2048
# Characters of a query, counted once for each document.
_MAX_REPEATED = 1 << 26

# Fields of one object; no form has as many.
MAX_FIELDS = 256


def _ids_or_checked(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Return token ids unchanged: the types of a list are their fastest check."""
    return given if _is_ids(given) else check(given)


def _rows_or_checked(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Return rows of token ids unchanged, and rows whose number `rows_of` refuses."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return given if len(given) > MAX_INPUTS or all(map(_is_ids, given)) else check(given)
    return _ids_or_checked(given, check)


def _is_ids(row: Any) -> bool:
    return isinstance(row, list) and set(map(type, row)) == {int}


class _FirstErrorOnly:
    """Annotation of a list whose only error is its first wrong element."""

    # pydantic's FailFast has no hash, which the types of a union need
    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


ListOf = Annotated[list[_Item], _FirstErrorOnly()]
Ids: TypeAlias = Annotated[ListOf[StrictInt], WrapValidator(_ids_or_checked)]
RowsOfIds: TypeAlias = Annotated[
    ListOf[StrictInt] | ListOf[ListOf[StrictInt]], WrapValidator(_rows_or_checked)
]
Texts: TypeAlias = Annotated[
    StrictStr | ListOf[StrictStr] | ListOf[StrictInt] | ListOf[ListOf[StrictInt]],
    WrapValidator(_rows_or_checked),
]


def check_number_of_fields(given: Any, most: int) -> Any:
    """Return an object unchanged.

    Raises:
        PydanticCustomError: the object has too many fields; each might have an error of its own.
    """
    if isinstance(given, dict) and len(given) > most:
        message = "the object has {fields} fields; allowed: up to {most}"
        raise PydanticCustomError("too_many_fields", message, {"fields": len(given), "most": most})
    return given


class Object(BaseModel):
    """An object that refuses unknown fields, and values of other JSON types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        return check_number_of_fields(given, MAX_FIELDS)


class Fields(Object):
    """An object whose nulls are left out.

    Attributes:
        ids_field: name of the field that may have token ids, which are not counted among the values of a body.
    """

    ids_field: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


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
        found = error.errors(include_url=False, include_input=False)
        errors = [{**each, "loc": ("body", *each["loc"])} for each in found]
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
