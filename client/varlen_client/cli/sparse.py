"""The command `varlen sparse-embed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from varlen_client.cli.files import texts_or_full_lines
from varlen_client.cli.options import shorten, show_progress
from varlen_client.cli.requests import RowOptions, with_options
from varlen_client.row_answers import SparseVector

SHOWN_TERMS = 8


@with_options
def sparse_embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to embed.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Embed each line of this UTF-8 file; - is stdin.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text, with all terms.")
    ] = False,
    prompt_name: Annotated[
        str | None, typer.Option(help="Prompt of the checkpoint that is put before texts.")
    ] = None,
    max_active_dims: Annotated[
        int | None, typer.Option(min=1, help="Terms of the largest weights alone.")
    ] = None,
    options: RowOptions,
) -> None:
    """Print the terms of texts and their weights, the largest first."""
    rows = texts_or_full_lines(texts, file)
    with (
        options.connect() as client,
        show_progress("embedding", len(rows), shown=file is not None) as on_progress,
    ):
        vectors = client.sparse_embed(
            rows,
            prompt_name=prompt_name,
            max_active_dims=max_active_dims,
            with_terms=True,
            **options.arguments,
            on_progress=on_progress,
        )
    for text, vector in zip(rows, vectors, strict=True):
        if as_json:
            typer.echo(json.dumps({"text": text, **_as_json(vector)}, ensure_ascii=False))
        else:
            typer.echo(f"{shorten(text)}  {_shown(vector)}")


def _as_json(vector: SparseVector) -> dict[str, object]:
    return {
        "indices": vector.indices.tolist(),
        # nine digits restore the exact fp32 value
        "values": [float(f"{value:.9g}") for value in vector.values],
        "terms": vector.terms,
    }


def _shown(vector: SparseVector) -> str:
    pairs = zip(vector.terms[:SHOWN_TERMS], vector.values, strict=False)
    shown = ", ".join(f"{term} {value:.4f}" for term, value in pairs)
    more = ", …" if len(vector.terms) > SHOWN_TERMS else ""
    return f"{len(vector.terms)} terms  [{shown}{more}]"
