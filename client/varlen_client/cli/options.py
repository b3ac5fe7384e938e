"""Options that several commands have, their files, and how they report errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn, cast

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


def texts_or_lines(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return the texts of the command line, or the lines of `file`.

    Some lines may be empty. Exits with a usage error if both or none are given, or if the file cannot be read.
    """
    if bool(texts) == (file is not None):
        usage_error("give either texts or --file")
    if file is None:
        return list(texts or [])
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        usage_error(f"cannot read {file}: {error.strerror}")
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError:
            usage_error(f"{file}, line {number}: not valid UTF-8")
    if not any(map(str.strip, rows)):
        usage_error(f"{file} has no text")
    return rows


def texts_or_full_lines(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return the texts, or the lines of `file`; an empty line is a usage error."""
    rows = texts_or_lines(texts, file)
    for number, row in enumerate(rows, start=1):
        if file is not None and not row.strip():
            usage_error(f"{file}, line {number}: empty")
    return rows


def check_output(output: Path, *, force: bool) -> None:
    """Exit with a usage error if `output` cannot be written, or exists without `force`."""
    if not output.parent.is_dir():
        usage_error(f"{output.parent} is not a folder")
    if output.is_dir():
        usage_error(f"{output} is a folder")
    if output.exists() and not force:
        usage_error(f"{output} exists (overwrite it with --force)")


def write_file(output: Path, write: Callable[[BinaryIO], object], *, force: bool) -> None:
    """Let `write` fill a temporary file, then rename it: no reader sees a part."""
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        if not force and output.exists():
            fail(f"{output} appeared while the command ran; nothing was written")
        part.replace(output)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")
    finally:
        part.unlink(missing_ok=True)
