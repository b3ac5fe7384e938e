"""What the commands of row tasks share: how texts are sent and answers shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import typer

from varlen_client.cli.files import check_output, texts_or_full_lines, write_file
from varlen_client.cli.options import print_message, shorten, usage_error
from varlen_client.cli.progress import show_progress
from varlen_client.cli.requests import RowOptions
from varlen_client.sync import Client
from varlen_client.wire import Floats

_Answer = TypeVar("_Answer")

Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.")]
Normalize = Annotated[
    bool | None, typer.Option(help="Scale vectors to length 1; default: the model decides.")
]
PromptName = Annotated[
    str | None, typer.Option(help="Prompt of the checkpoint that is put before texts.")
]
JsonPerText = Annotated[bool, typer.Option("--json", help="Print one JSON object per text.")]
JsonOfValues = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per text, with all values.")
]


@dataclass(frozen=True, slots=True)
class RowCommand(Generic[_Answer]):
    """A command that sends rows, and prints or writes an answer to each.

    Attributes:
        method: method of the client, which returns an answer per row.
        progress: word of the progress bar.
        fields: function that returns the fields of an answer's JSON object, beside its text.
        lines: function that returns the lines of an answer; each is printed after the text.
        written: name of the arrays that a file gets.
    """

    method: Callable[..., Iterable[_Answer]]
    progress: str
    fields: Callable[[_Answer], dict[str, object]]
    lines: Callable[[_Answer], Iterable[str]]
    written: str = ""

    def run(
        self,
        texts: Sequence[str] | None,
        file: Path | None,
        options: RowOptions,
        *,
        as_json: bool,
        output: Path | None = None,
        force: bool = False,
        **parameters: Any,
    ) -> None:
        """Send texts, or the lines of a file, and print their answers or write arrays."""
        rows = texts_or_full_lines(texts, file)
        if output is not None:
            if as_json:
                usage_error("give either --output or --json")
            check_output(output, force=force)
        with options.connect() as client:
            answers = self.ask(client, rows, file, **options.arguments, **parameters)
        if output is None:
            self.show(rows, answers, as_json=as_json)
        else:
            named = {str(number): array for number, array in enumerate(answers)}
            write_file(output, lambda stream: np.savez(stream, **named), force=force)
            print_message(f"wrote the {self.written} of {len(rows)} texts to {output}")

    def ask(self, client: Client, rows: Sequence[str], file: Path | None, **arguments: Any) -> Any:
        """Return what the method returns; lines of a file have a progress bar."""
        with show_progress(self.progress, len(rows), shown=file is not None) as on_progress:
            return self.method(client, rows, **arguments, on_progress=on_progress)

    def show(self, rows: Sequence[str], answers: Iterable[_Answer], *, as_json: bool) -> None:
        """Print the answers of rows."""
        for text, answer in zip(rows, answers, strict=True):
            if as_json:
                typer.echo(json.dumps({"text": text, **self.fields(answer)}, ensure_ascii=False))
                continue
            for line in self.lines(answer):
                typer.echo(f"{shorten(text)}  {line}")


def exact_values(array: Floats) -> Any:
    """Return an array as lists of numbers that restore its exact fp32 values."""
    # nine digits do
    return np.vectorize(lambda value: float(f"{value:.9g}"), otypes=[float])(array).tolist()
