"""The commands `varlen classify` and `varlen rerank`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from varlen_client.cli.files import texts_or_full_lines
from varlen_client.cli.options import shorten, show_progress
from varlen_client.cli.requests import RowOptions, with_options
from varlen_client.row_options import Activation

_Activation = Annotated[
    Activation | None,
    typer.Option(help="Makes scores of logits; auto: as the checkpoint says."),
]
_TopK = Annotated[int | None, typer.Option(min=1, help="Show only the best; default: all.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


@with_options
def classify(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to classify.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Classify each line of this UTF-8 file; - is stdin.")
    ] = None,
    activation: _Activation = None,
    top_k: _TopK = None,
    as_json: _Json = False,
    options: RowOptions,
) -> None:
    """Print labels and scores of texts, or of a file's lines, the best first."""
    rows = texts_or_full_lines(texts, file)
    with (
        options.connect() as client,
        show_progress("classifying", len(rows), shown=file is not None) as on_progress,
    ):
        answers = client.predict(
            rows, activation=activation, top_k=top_k, **options.arguments, on_progress=on_progress
        )
    for text, labels in zip(rows, answers, strict=True):
        if as_json:
            found = [{"label": each.label, "score": each.score} for each in labels]
            typer.echo(json.dumps({"text": text, "labels": found}, ensure_ascii=False))
        else:
            shown = ", ".join(f"{each.label} {each.score:.4f}" for each in labels)
            typer.echo(f"{shorten(text)}  {shown}")


@with_options
def rerank(
    query: Annotated[str, typer.Argument(help="What the documents are compared with.")],
    documents: Annotated[list[str] | None, typer.Argument(help="Documents to rank.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Rank the lines of this UTF-8 file; - is stdin.")
    ] = None,
    activation: _Activation = "auto",
    top_k: _TopK = None,
    as_json: _Json = False,
    options: RowOptions,
) -> None:
    """Print documents, or a file's lines, and their scores, the most relevant first.

    The number of a document is its place in the input, from 1.
    """
    rows = texts_or_full_lines(documents, file)
    with options.connect() as client:
        scores = client.rerank(query, rows, activation=activation, **options.arguments).tolist()
    best = sorted(range(len(rows)), key=lambda row: -scores[row])[:top_k]
    for row in best:
        if as_json:
            found = {"number": row + 1, "score": scores[row], "document": rows[row]}
            typer.echo(json.dumps(found, ensure_ascii=False))
        else:
            typer.echo(f"{scores[row]:8.4f}  {row + 1:4}  {shorten(rows[row])}")
