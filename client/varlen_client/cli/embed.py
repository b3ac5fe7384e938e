"""The commands `varlen embed` and `varlen similarity`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from varlen_client.aio import DEFAULT_CONCURRENCY
from varlen_client.cli.options import (
    check_output,
    print_message,
    shorten,
    texts_or_lines,
    usage_error,
    write_file,
)
from varlen_client.cli.requests import RowOptions, with_options
from varlen_client.cli.rows import (
    Force,
    JsonOfValues,
    Normalize,
    PromptName,
    RowCommand,
    exact_values,
)
from varlen_client.sync import Client
from varlen_client.wire import Floats

SHOWN_VALUES = 4


def _values(vector: Floats) -> list[str]:
    values = ", ".join(f"{value:.4f}" for value in vector[:SHOWN_VALUES])
    more = ", …" if len(vector) > SHOWN_VALUES else ""
    return [f"{len(vector)} values  [{values}{more}]"]


_EMBED = RowCommand(
    Client.embed, "embedding", lambda vector: {"embedding": exact_values(vector)}, _values
)


@with_options
def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to embed.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Embed each line of this UTF-8 file; - is stdin.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the vectors here, .npy of fp32, a row per text.")
    ] = None,
    force: Force = False,
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Skip empty lines; by default they are an error.")
    ] = False,
    as_json: JsonOfValues = False,
    normalize: Normalize = None,
    prompt_name: PromptName = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Keep only the first N dimensions; default: all.")
    ] = None,
    rows_per_request: Annotated[
        int | None, typer.Option(min=1, help="Default: 32, or the model's limit if that is less.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum requests in flight.")
    ] = DEFAULT_CONCURRENCY,
    options: RowOptions,
) -> None:
    """Print or write the vectors of texts."""
    rows = _without_empty(texts_or_lines(texts, file), file, skip=skip_empty)
    if output is not None:
        check_output(output, force=force)
    start = time.monotonic()
    connection = {"rows_per_request": rows_per_request, "concurrency": concurrency}
    given = {"normalize": normalize, "prompt_name": prompt_name, "dimensions": dimensions}
    with options.connect(**connection) as client:
        vectors = _EMBED.ask(client, rows, file, **options.arguments, **given)
    seconds = time.monotonic() - start
    if output is None:
        _EMBED.show(rows, vectors, as_json=as_json)
    else:
        write_file(output, lambda stream: np.save(stream, vectors), force=force)
        print_message(
            f"wrote {vectors.shape[0]} vectors of {vectors.shape[1]} values to {output} "
            f"in {seconds:.1f} s ({len(rows) / seconds:.0f} texts/s)"
        )


@with_options
def similarity(
    texts: Annotated[list[str], typer.Argument(help="At least two texts.")],
    *,
    options: RowOptions,
) -> None:
    """Print the cosine similarity of each pair of texts."""
    if len(texts) == 1:
        usage_error("similarity needs at least two texts")
    with options.connect() as client:
        vectors = client.embed(texts, **options.arguments)
    print_similarity(texts, vectors)


def print_similarity(texts: Sequence[str], vectors: Floats) -> None:
    """Print the cosine similarity of each pair of texts, whose vectors are `[texts, features]`."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)  # [texts, 1]
    unit = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    cosines = unit @ unit.T  # [texts, texts]

    table = Table(title="cosine similarity", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("text", overflow="fold")
    for number in range(1, len(texts) + 1):
        table.add_column(str(number), justify="right", no_wrap=True)
    for number, (text, row) in enumerate(zip(texts, cosines, strict=True), start=1):
        cells = [f"{cosine:.3f}" for cosine in row]
        table.add_row(str(number), escape(shorten(text)), *cells)
    Console().print(table)


def _without_empty(rows: Sequence[str], file: Path | None, *, skip: bool) -> list[str]:
    """Return the rows without empty lines of a file, an error unless skipped."""
    for number, row in enumerate(rows, start=1):
        if file is not None and not skip and not row.strip():
            usage_error(f"{file}, line {number}: empty (skip empty lines with --skip-empty)")
    return [row for row in rows if file is None or row.strip()]
