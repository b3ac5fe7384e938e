"""Files of commands: lines in, results out whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from varlen_client.cli.options import fail, usage_error


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
