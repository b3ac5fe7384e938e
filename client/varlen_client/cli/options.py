"""Options that several commands have, and how commands report errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn, cast

import typer

from varlen_client.errors import InvalidUrl, VarlenClientError

SHOWN_CHARACTERS = 40

Urls = Annotated[
    list[str],
    typer.Option(
        "--url",
        envvar="VARLEN_URL",
        help="grpc://host:port or http://host:port; grpcs and https use TLS."
        " May be repeated for replicas, in the variable with spaces between;"
        " dns+grpc://name:port is all addresses of a name.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(envvar="VARLEN_MODEL", help="Default: the only ready model of the server."),
]
# A tuple, since a data class refuses a list as a default; typer knows only lists as types.
DEFAULT_URLS = cast("list[str]", ("grpc://127.0.0.1:8001",))


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn the client's errors into a message and an exit code."""
    try:
        yield
    except InvalidUrl as error:
        usage_error(str(error))
    except VarlenClientError as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Print an error of the server or of a request, and exit with 1."""
    print_message(f"error: {message}")
    raise typer.Exit(1)


def usage_error(message: str) -> NoReturn:
    """Print an error of the arguments or of an input file, and exit with 2."""
    print_message(f"error: {message}")
    raise typer.Exit(2)


def print_message(message: str) -> None:
    """Print one line to stderr."""
    typer.echo(" ".join(message.split()), err=True)


def shorten(text: str) -> str:
    """Return the beginning of a text on one line."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
