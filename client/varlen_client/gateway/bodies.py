"""What the bodies of requests and answers share.

Fields that cut texts have the names of every interface. TEI says `truncate: true`, NVIDIA NIM and Cohere
`truncate: "END"`, vLLM `truncate_prompt_tokens: -1`, or a number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, cast

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import Self

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.unserved_fields import ADAPTERS, UnservedFields

_Fields = TypeVar("_Fields", bound="Fields")
_Item = TypeVar("_Item")
# Counts the names of fields that are ignored.
Ignore: TypeAlias = Callable[[Collection[str]], None]

Direction: TypeAlias = Literal["left", "right", "Left", "Right"]
CutEnd: TypeAlias = Literal["NONE", "START", "END"]

# Side that each name cuts; None cuts nothing.
_SIDES: Mapping[CutEnd, str | None] = {"NONE": None, "START": "left", "END": "right"}

# As many as OpenAI takes.
MAX_INPUTS = 2048
# Characters of a text that several pairs have, counted once for each.
_MAX_REPEATED = 1 << 26

# Fields of one object; no form has as many.
MAX_FIELDS = 256
# Characters of the name of a field that are looked at.
MAX_NAME = 64
# Between a model and an adapter that a body names in fields of their own: no name has it.
AND_ADAPTER = "\0"
# Type of the error of a field that is unknown or not served, whose object is its location.
REFUSED_FIELD = "refused_field"


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
    """An object of a body.

    Values are read as by pydantic, as vLLM's are: "true" is a boolean, "2" and 2.0 are integers. Unknown fields are
    ignored if `checked` says so, else refused with the nearest name.

    Attributes:
        unserved: fields that are refused with a reason.
        noun: name of such an object in counts of ignored fields; empty is a body.
        is_strict: whether unknown fields are always refused.
    """

    # the OpenAPI description has the docstrings of fields
    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False)

    unserved: ClassVar[UnservedFields] = {}
    noun: ClassVar[str] = ""
    is_strict: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_fields(cls, given: Any, info: ValidationInfo) -> Any:
        check_number_of_fields(given, MAX_FIELDS)
        names = _names_of(cls)
        is_open = cls.model_config.get("extra") == "allow"
        if is_open or not isinstance(given, dict) or names.issuperset(given):
            return given
        ignored: set[str] | None = None if cls.is_strict else info.context
        for name in given:
            if name in names:
                continue
            field = _unserved_of(cls).get(name)
            if field is not None:
                if not field.allows(given[name]):
                    raise refused_field(name, f"is not supported: {field.reason}")
            elif given[name] is None:
                continue
            elif ignored is None:
                raise refused_field(name, _unknown(name, names))
            else:
                ignored.add(f"{cls.noun}.{name}" if cls.noun else name)
        return {name: value for name, value in given.items() if name in names}


@cache
def _names_of(form: type[Object]) -> frozenset[str]:
    """Return the names that fields of a form have in JSON."""
    return frozenset(field.alias or name for name, field in form.model_fields.items())


@cache
def _unserved_of(form: type[Object]) -> UnservedFields:
    """Return the fields that a form and its bases refuse with a reason."""
    bases = reversed([each for each in form.__mro__ if issubclass(each, Object)])
    return {name: field for each in bases for name, field in each.unserved.items()}


def refused_field(name: str, why: str) -> PydanticCustomError:
    """Return the error of a field that is refused with a reason."""
    return PydanticCustomError(REFUSED_FIELD, "{why}", {"name": name, "why": why})


def _unknown(name: str, names: Collection[str]) -> str:
    nearest = get_close_matches(name[:MAX_NAME], names, 1)
    remedy = f"write {nearest[0]}" if nearest else "leave it out"
    return f"is no field of this object; {remedy}"


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

    unserved = ADAPTERS

    model: str | None = None
    """The model, or `MODEL:ADAPTER`; by default the name in `?model=`, the gateway's, or the only ready model."""
    adapter: StrictStr | None = None
    """Name of the adapter that changes the model."""
    lora_path: StrictStr | None = None
    """SGLang's name of `adapter`."""

    @model_validator(mode="after")
    def _with_adapter(self) -> Self:
        if self.adapter and self.lora_path and self.adapter != self.lora_path:
            raise refused_field("lora_path", "and adapter are two names of one field; send one")
        adapter, model = self.adapter or self.lora_path, self.model or ""
        if adapter:
            self.model = f"{model}{AND_ADAPTER}{adapter}"
        return self


class OpenAIBody(RequestBody):
    """A body of OpenAI's interface, with fields that change no answer."""

    user: Any = None
    """Ignored."""
    metadata: Any = None
    """Ignored."""


class TextFields(Fields):
    """How texts that are too long are cut.

    Attributes:
        is_cut_by_default: whether they are cut if nothing says it.
    """

    is_cut_by_default: ClassVar[bool] = False

    truncate: bool | CutEnd | None = None
    truncation: bool | None = None
    """The name of `truncate` in Voyage's API and in pipelines of transformers."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens that are kept, by vLLM; -1 is its name of `truncate`."""
    truncation_side: Direction | None = None
    truncation_direction: Direction | None = None
    """TEI's name of `truncation_side`."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _is_a_length(cls, tokens: int) -> int:
        if tokens < 1 and tokens != -1:
            raise PydanticCustomError(
                "not_a_length",
                "Input should be -1, the longest input of the model, or a number of tokens from 1",
            )
        return tokens

    def truncation_options(self, *, auto_truncate: bool) -> dict[str, Any]:
        """Return the client's arguments for the truncation of texts.

        Args:
            auto_truncate: whether texts are cut if the request does not say it.

        Raises:
            InvalidRequest: fields contradict each other, or a side is given and nothing is cut.
        """
        side = self._cut_side()
        truncate = self._is_cut()
        if truncate is None:
            truncate = auto_truncate or self.is_cut_by_default
            if side == "left" and not truncate:
                raise InvalidRequest(
                    "truncation_side is left, but no text is cut; send truncate: true with it"
                )
        if not truncate:
            return {}
        length = self.truncate_prompt_tokens
        cut = {"truncate": True} if length in (None, -1) else {"truncate_prompt_tokens": length}
        return cut | given_options(truncation_side=side)

    def _is_cut(self) -> bool | None:
        """Return whether texts are cut; None where the request does not say it."""
        if self.truncate is not None and self.truncation is not None:
            raise InvalidRequest("the request has truncate and truncation; send one of them")
        given = self.truncation if self.truncate is None else self.truncate
        if isinstance(given, str):
            given = _SIDES[given] is not None
        if self.truncate_prompt_tokens is None:
            return given
        if given is False:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {self.truncate_prompt_tokens}, but truncate forbids it; send one of them"
            )
        return True

    def _cut_side(self) -> str | None:
        """Return the side that is cut; None where the request does not say it."""
        named = _SIDES[self.truncate] if isinstance(self.truncate, str) else None
        given = {
            "truncate": named,
            "truncation_side": self.truncation_side,
            "truncation_direction": self.truncation_direction,
        }
        sides = {name: side.lower() for name, side in given.items() if side is not None}
        if len(set(sides.values())) > 1:
            found = " and ".join(f"{name} {getattr(self, name)}" for name in sides)
            raise InvalidRequest(f"the request has {found}; send one of them")
        return next(iter(sides.values()), None)


class InstructionFields(TextFields):
    """What the model has to find, in two names."""

    instruction: StrictStr | None = None
    """What the model has to find, of models that read it; empty is none."""
    instruct: StrictStr | None = None
    """SGLang's and Alibaba's name of `instruction`."""

    def instruction_option(self) -> dict[str, Any]:
        """Return the client's argument.

        Raises:
            InvalidRequest: the request has both names.
        """
        if self.instruction and self.instruct:
            raise InvalidRequest("the request has instruction and instruct; send one of them")
        return given_options(instruction=self.instruction or self.instruct or None)


def checked(form: type[_Fields], body: Any, ignore: Ignore | None) -> _Fields:
    """Return a body in this form.

    Args:
        ignore: function that gets the names of unknown fields; None refuses them.

    Raises:
        RequestValidationError: it has another form.
    """
    ignored: set[str] = set()
    try:
        found = form.model_validate(body, context=None if ignore is None else ignored)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        located = [{**each, "loc": ("body", *each["loc"])} for each in errors]
        raise RequestValidationError(located, body=body) from None
    if ignore is not None and ignored:
        ignore(ignored)
    return found


def rows_of(texts: Texts, name: str, most: int = MAX_INPUTS) -> list[str] | list[list[int]]:
    """Return one text, or one list of token ids, per row.

    Raises:
        InvalidRequest: see `check_rows`.
    """
    is_one = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
    rows = [texts] if is_one else texts
    check_rows(name, rows, most)
    return cast("list[str] | list[list[int]]", rows)


def check_rows(name: str, rows: Sequence[object], most: int = MAX_INPUTS) -> None:
    """Raise InvalidRequest unless there are 1 to `most` rows."""
    if not 1 <= len(rows) <= most:
        raise InvalidRequest(f"{name} has {len(rows)} rows; allowed: 1 to {most}")


def check_repeated(name: str, text: str, times: int) -> None:
    """Raise InvalidRequest if a text that several pairs have would fill the memory."""
    if len(text) * times > _MAX_REPEATED:
        raise InvalidRequest(
            f"{name} has {len(text)} characters for {times} pairs; allowed: {_MAX_REPEATED} in all,"
            " so send fewer at once"
        )


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options that a request has."""
    return {name: value for name, value in options.items() if value is not None}
