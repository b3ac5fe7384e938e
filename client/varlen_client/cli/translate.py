"""The command `varlen translate`: texts, or the lines of a file, in their order."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from varlen_client.aio import DEFAULT_TEXT_CONCURRENCY
from varlen_client.cli.options import check_output, fail, print_message, texts_or_lines, write_file
from varlen_client.cli.progress import show_progress
from varlen_client.cli.requests import RequestOptions, with_options
from varlen_client.errors import VarlenClientError
from varlen_client.generation import Translation

_STDOUT = Path("-")


@with_options
def translate(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to translate.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Translate each line of this UTF-8 file; - is stdin.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Write a line per translation here; default: stdout.")
    ] = _STDOUT,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
    beams: Annotated[
        int | None, typer.Option(min=1, help="Beams of each text; default: the model decides.")
    ] = None,
    n_best: Annotated[
        int,
        typer.Option(
            min=1,
            help="Translations of each text; above 1 each line has a score, a tab and a text.",
        ),
    ] = 1,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest translation, in tokens; default: the model decides."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum texts in flight.")
    ] = DEFAULT_TEXT_CONCURRENCY,
    options: RequestOptions,
) -> None:
    """Translate texts, or the lines of a file.

    Lines stay in order, and empty ones stay empty.
    """
    lines = texts_or_lines(texts, file)
    if output != _STDOUT:
        check_output(output, force=force)
    places = [place for place, line in enumerate(lines) if line.strip()]
    start = time.monotonic()
    with (
        options.connect(concurrency=concurrency) as client,
        show_progress("translating", len(places), shown=file is not None) as on_progress,
    ):
        try:
            answers = client.translate(
                [lines[place] for place in places],
                num_beams=beams,
                n_best=n_best,
                max_tokens=max_tokens,
                **options.arguments,
                on_progress=on_progress,
            )
        except VarlenClientError as error:
            if file is None or error.rows is None or len(error.rows) > 1:
                raise
            reason = re.sub(r"^row \d+( of \d+)?: ", "", str(error))
            fail(f"{file}, line {places[error.rows.start] + 1}: {reason}")
    seconds = time.monotonic() - start
    written = [""] * len(lines)
    for place, answer in zip(places, answers, strict=True):
        written[place] = _line(answer) if n_best == 1 else _scored_lines(answer)
    if output == _STDOUT:
        for line in written:
            typer.echo(line)
    else:
        content = "".join(f"{line}\n" for line in written).encode()
        write_file(output, lambda stream: stream.write(content), force=force)
        print_message(
            f"wrote {len(places)} translations to {output} in {seconds:.1f} s "
            f"({len(places) / seconds:.0f} texts/s)"
        )


def _line(answer: Translation) -> str:
    # a line break inside a translation would make it two
    return " ".join(answer.text.splitlines())


def _scored_lines(answer: Translation) -> str:
    """Return a line per translation: its score, a tab, its text."""
    return "\n".join(f"{each.score:.4f}\t{_line(each)}" for each in (answer, *answer.alternatives))
