"""Routes that parse and check bodies within limits, large ones off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import MAX_INPUTS, Fields, Ignore, checked
from varlen_client.gateway.errors import BodyRefused, describe
from varlen_client.gateway.json_reading import (
    MAX_IDS,
    MAX_VALUES,
    SMALL_BYTES,
    JsonSize,
    in_thread,
    read_json,
    size_of,
)

_Form = TypeVar("_Form", bound=Fields)


class BodyRoute(APIRoute):
    """A route whose body, if it is JSON, is read by `read_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers requests."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        form: type[Fields] = self.body_field.field_info.annotation  # type: ignore[assignment]

        async def read_and_handle(request: Request) -> Response:
            return await handle(_BodyRequest(form, request))

        return read_and_handle


class _BodyRequest(Request):
    """A request whose JSON is a checked body, which FastAPI does not check again."""

    def __init__(self, form: type[Fields], request: Request) -> None:
        super().__init__(request.scope, request.receive)
        self._body_form = form

    async def json(self) -> Fields:
        """Return the body.

        Raises:
            BodyRefused: the body has another form; FastAPI passes on no other errors.
        """
        try:
            ignore: Ignore | None = self.app.state.ignore_fields
            return await read_body(self._body_form, await self.body(), ignore)
        except InvalidRequest as error:
            raise BodyRefused(str(error)) from None
        except RequestValidationError as error:
            param, message = describe(error)
            raise BodyRefused(message, param) from None


async def read_body(form: type[_Form], body: bytes, ignore: Ignore | None) -> _Form:
    """Return a body in this form; `ignore` is the argument of `checked`.

    Raises:
        InvalidRequest: it is no JSON, or exceeds the limits.
        RequestValidationError: it has another form.
    """
    if len(body) <= SMALL_BYTES:
        return checked(form, read_json(body), ignore)
    return await in_thread(partial(_read_large, form, body, ignore))


def _read_large(form: type[_Form], body: bytes, ignore: Ignore | None) -> _Form:
    size = size_of(body)
    size.check(MAX_VALUES + (MAX_IDS if form.ids_field else 0))
    given = read_json(body)
    if form.ids_field is not None:
        _check_ids(given, form.ids_field, size)
    return checked(form, given, ignore)


def _check_ids(given: Any, name: str, size: JsonSize) -> None:
    """Raise InvalidRequest if a body has too many token ids, or values besides them."""
    ids = _number_of_ids(given.get(name)) if isinstance(given, dict) else 0
    if size.values - ids > MAX_VALUES:
        raise InvalidRequest(
            f"the body has {size.values - ids} values besides {name}; allowed: up to {MAX_VALUES}"
        )
    if ids > MAX_IDS:
        raise InvalidRequest(
            f"{name} has {ids} values; allowed: up to {MAX_IDS}, so send fewer at once"
        )


def _number_of_ids(rows: Any) -> int:
    if not isinstance(rows, list):
        return 0
    # rows of texts are counted too, and refused later for their number
    if len(rows) > MAX_INPUTS:
        return len(rows)
    return sum(len(row) if isinstance(row, list) else 1 for row in rows)
