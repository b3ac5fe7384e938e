"""The command `varlen fill-mask`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from varlen_client.cli.files import texts_or_full_lines
from varlen_client.cli.options import shorten, show_progress
from varlen_client.cli.requests import RowOptions, with_options


@with_options
def fill_mask(
    texts: Annotated[
        list[str] | None,
        typer.Argument(help='Texts with masks: "Paris is the [MASK] of France."'),
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Fill the lines of this UTF-8 file; - is stdin.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each mask; default: 5.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text.")
    ] = False,
    options: RowOptions,
) -> None:
    """Print the most likely tokens of each mask, one line per mask, the likeliest first."""
    rows = texts_or_full_lines(texts, file)
    with (
        options.connect() as client,
        show_progress("filling", len(rows), shown=file is not None) as on_progress,
    ):
        answers = client.fill_mask(rows, top_k=top_k, **options.arguments, on_progress=on_progress)
    for text, masks in zip(rows, answers, strict=True):
        if as_json:
            found = [[asdict(token) for token in mask] for mask in masks]
            typer.echo(json.dumps({"text": text, "masks": found}, ensure_ascii=False))
            continue
        for mask in masks:
            shown = ", ".join(f"{token.text} {token.score:.4f}" for token in mask)
            typer.echo(f"{shorten(text)}  {shown}")
