"""Commands of the tasks that answer a text with an array of tokens.

They are `varlen token-embed`, `varlen token-classify` and `varlen hidden`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from varlen_client.cli.files import check_output, texts_or_full_lines, write_file
from varlen_client.cli.options import print_message, shorten, show_progress, usage_error
from varlen_client.cli.requests import RowOptions, with_options
from varlen_client.sync import Client
from varlen_client.wire import Floats

Texts = Annotated[list[str] | None, typer.Argument(help="Texts.")]
File = Annotated[Path | None, typer.Option(help="Send the lines of this UTF-8 file; - is stdin.")]
Output = Annotated[
    Path | None,
    typer.Option(help="Write one fp32 array per text here, .npz, named 0, 1 and so on."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per text, with all values.")
]


@with_options
def token_embed(
    texts: Texts = None,
    *,
    file: File = None,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="query, document, or another prompt of the checkpoint."),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1; default: the model decides.",
        ),
    ] = None,
    options: RowOptions,
) -> None:
    """Print or write the vectors of each text's tokens (late interaction, ColBERT)."""
    _Answers("vectors", texts, file, output, force, as_json).ask(
        Client.token_embed, options, prompt_name=prompt_name, normalize=normalize
    )


@with_options
def token_classify(
    texts: Texts = None,
    *,
    file: File = None,
    output: Output = None,
    force: Force = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text.")
    ] = False,
    options: RowOptions,
) -> None:
    """Print each text's tokens with their best labels, or write the logits of all labels."""
    if output is not None:
        answers = _Answers("logits", texts, file, output, force, as_json)
        answers.ask(Client.token_classify, options)
        return
    rows = texts_or_full_lines(texts, file)
    with (
        options.connect() as client,
        show_progress("sending", len(rows), shown=file is not None) as on_progress,
    ):
        labels = client.predict_tokens(rows, **options.arguments, on_progress=on_progress)
    for text, tokens in zip(rows, labels, strict=True):
        if as_json:
            found = [asdict(each) for each in tokens]
            typer.echo(json.dumps({"text": text, "tokens": found}, ensure_ascii=False))
        else:
            shown = ", ".join(f"{each.token} {each.label} {each.score:.4f}" for each in tokens)
            typer.echo(f"{shorten(text)}  {shown}")


@with_options
def hidden(
    texts: Texts = None,
    *,
    file: File = None,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
    options: RowOptions,
) -> None:
    """Print or write the last hidden state of each text's tokens."""
    _Answers("hidden states", texts, file, output, force, as_json).ask(Client.hidden, options)


@dataclass(frozen=True, slots=True)
class _Answers:
    """What a command reads, and where its answers go; `name` is what they are."""

    name: str
    texts: list[str] | None
    file: Path | None
    output: Path | None
    force: bool
    as_json: bool

    def ask(
        self,
        method: Callable[..., list[Floats]],
        options: RowOptions,
        **parameters: object,
    ) -> None:
        """Send the texts by a method of the client, and print or write the answers."""
        rows = texts_or_full_lines(self.texts, self.file)
        if self.output is not None:
            if self.as_json:
                usage_error("give either --output or --json")
            check_output(self.output, force=self.force)
        with (
            options.connect() as client,
            show_progress("sending", len(rows), shown=self.file is not None) as on_progress,
        ):
            arrays = method(
                client, rows, **parameters, **options.arguments, on_progress=on_progress
            )
        if self.output is not None:
            named = {str(number): array for number, array in enumerate(arrays)}
            write_file(self.output, lambda stream: np.savez(stream, **named), force=self.force)
            print_message(f"wrote the {self.name} of {len(arrays)} texts to {self.output}")
            return
        for text, array in zip(rows, arrays, strict=True):
            if self.as_json:
                # nine digits restore the exact fp32 value
                values = [[float(f"{value:.9g}") for value in row] for row in array]
                name = self.name.partition(" ")[0]
                typer.echo(json.dumps({"text": text, name: values}, ensure_ascii=False))
            else:
                count, width = array.shape
                # some tokens have no vector
                counted = "vectors" if self.name == "vectors" else "tokens"
                typer.echo(f"{shorten(text)}  {count} {counted} of {width} values")
