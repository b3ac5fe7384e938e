"""The commands of row tasks, such as `varlen embed` and `varlen rerank`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

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
    texts_or_full_lines,
    texts_or_lines,
    usage_error,
    write_file,
)
from varlen_client.cli.progress import show_progress
from varlen_client.cli.requests import RowOptions, with_options
from varlen_client.row_answers import SparseVector
from varlen_client.row_options import Activation
from varlen_client.sync import Client
from varlen_client.tasks import RANK
from varlen_client.wire import Floats, query_and_documents

_Answer = TypeVar("_Answer")

Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.")]
Normalize = Annotated[
    bool | None, typer.Option(help="Scale vectors to length 1; default: the model decides.")
]
Instruction = Annotated[
    str | None, typer.Option(help="What the model has to find, if it reads instructions.")
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


SHOWN_TERMS = 8

_Activation = Annotated[
    Activation | None,
    typer.Option(help="Makes scores of logits; auto: as the checkpoint says."),
]
_TopK = Annotated[int | None, typer.Option(min=1, help="Show only the best; default: all.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
_Texts = Annotated[list[str] | None, typer.Argument(help="Texts.")]
_File = Annotated[Path | None, typer.Option(help="Send the lines of this UTF-8 file; - is stdin.")]
_Output = Annotated[
    Path | None,
    typer.Option(help="Write one fp32 array per text here, .npz, named 0, 1 and so on."),
]


def _shown(score: float) -> str:
    """Return a score in four decimals, or like 2.1e-09 below 0.001."""
    return f"{score:.1e}" if 0 < abs(score) < 1e-3 else f"{score:.4f}"


def _terms(vector: SparseVector) -> list[str]:
    pairs = zip(vector.terms[:SHOWN_TERMS], vector.values, strict=False)
    shown = ", ".join(f"{term} {_shown(value)}" for term, value in pairs)
    more = ", …" if len(vector.terms) > SHOWN_TERMS else ""
    return [f"{len(vector.terms)} terms  [{shown}{more}]"]


def _arrays(method: Callable[..., list[Floats]], name: str, rows: str) -> RowCommand[Floats]:
    """Return a command that answers with an array per text.

    Args:
        name: name of the arrays; its first word names the JSON field.
    """
    return RowCommand(
        method,
        "sending",
        lambda array: {name.partition(" ")[0]: exact_values(array)},
        lambda array: [f"{array.shape[0]} {rows} of {array.shape[1]} values"],
        written=name,
    )


_CLASSIFY = RowCommand(
    Client.predict,
    "classifying",
    lambda labels: {"labels": [asdict(each) for each in labels]},
    lambda labels: [", ".join(f"{each.label} {_shown(each.score)}" for each in labels)],
)
_SPARSE_EMBED = RowCommand(
    Client.sparse_embed,
    "embedding",
    lambda vector: {
        "indices": vector.indices.tolist(),
        "values": exact_values(vector.values),
        "terms": vector.terms,
    },
    _terms,
)
_FILL_MASK = RowCommand(
    Client.fill_mask,
    "filling",
    lambda masks: {"masks": [[asdict(token) for token in mask] for mask in masks]},
    lambda masks: [
        ", ".join(f"{each.text} {_shown(each.score)}" for each in mask) for mask in masks
    ],
)
_TOKEN_LABELS = RowCommand(
    Client.predict_tokens,
    "sending",
    lambda tokens: {"tokens": [asdict(each) for each in tokens]},
    lambda tokens: [
        ", ".join(f"{each.token} {each.label} {_shown(each.score)}" for each in tokens)
    ],
)
_EXTRACT = RowCommand(
    Client.extract,
    "sending",
    lambda spans: {"spans": [asdict(each) for each in spans]},
    lambda spans: [
        f"{each.start}-{each.end}  {each.label}  {_shown(each.score)}  {each.text}"
        for each in spans
    ],
)
_TOKEN_LOGITS = _arrays(Client.token_classify, "logits", "tokens")
# some tokens have no vector
_TOKEN_EMBED = _arrays(Client.token_embed, "vectors", "vectors")
_HIDDEN = _arrays(Client.hidden, "hidden states", "tokens")


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
    """Print the labels and scores of texts, the best first."""
    _CLASSIFY.run(texts, file, options, as_json=as_json, activation=activation, top_k=top_k)


@with_options
def rerank(
    query: Annotated[str, typer.Argument(help="What the documents are compared with.")],
    documents: Annotated[list[str] | None, typer.Argument(help="Documents to rank.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Rank the lines of this UTF-8 file; - is stdin.")
    ] = None,
    activation: _Activation = "auto",
    instruction: Instruction = None,
    top_k: _TopK = None,
    as_json: _Json = False,
    options: RowOptions,
) -> None:
    """Print documents and scores, the most relevant first.

    The number of a document is its place in the input, from 1.
    """
    rows = texts_or_full_lines(documents, file)
    with options.connect() as client:
        pairs = query_and_documents(query, rows)
        given = {"activation": activation, "instruction": instruction}
        ranking, _ = client.counted(RANK, pairs, **given, **options.arguments)
    scores, best = ranking.scores.tolist(), ranking.best_first[:top_k].tolist()
    for row in best:
        if as_json:
            found = {"number": row + 1, "score": scores[row], "document": rows[row]}
            typer.echo(json.dumps(found, ensure_ascii=False))
        else:
            typer.echo(f"{_shown(scores[row]):>8}  {row + 1:4}  {shorten(rows[row])}")


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
    prompt_name: PromptName = None,
    max_active_dims: Annotated[
        int | None, typer.Option(min=1, help="Keep only the N largest weights.")
    ] = None,
    options: RowOptions,
) -> None:
    """Print the terms of texts and their weights (SPLADE).

    The terms with the largest weights come first.
    """
    given: dict[str, Any] = {
        "prompt_name": prompt_name,
        "max_active_dims": max_active_dims,
        "with_terms": True,
    }
    _SPARSE_EMBED.run(texts, file, options, as_json=as_json, **given)


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
    as_json: JsonPerText = False,
    options: RowOptions,
) -> None:
    """Print the most likely tokens of each mask.

    A line per mask, the likeliest token first.
    """
    _FILL_MASK.run(texts, file, options, as_json=as_json, top_k=top_k)


@with_options
def extract(
    texts: _Texts = None,
    *,
    labels: Annotated[
        list[str], typer.Option("--label", "-l", help="A label, such as person; give several.")
    ],
    file: _File = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Spans have scores above this; default: 0.5.")
    ] = None,
    nested: Annotated[
        bool, typer.Option("--nested", help="A span may contain another one.")
    ] = False,
    multi_label: Annotated[
        bool, typer.Option("--multi-label", help="A span may have several labels.")
    ] = False,
    as_json: JsonPerText = False,
    options: RowOptions,
) -> None:
    """Print the spans of texts that have one of the labels (GLiNER).

    A line per span, with its first character and the one behind its last.
    """
    given: dict[str, Any] = {
        "labels": labels,
        "threshold": threshold,
        "flat_ner": not nested,
        "multi_label": multi_label,
    }
    _EXTRACT.run(texts, file, options, as_json=as_json, **given)


@with_options
def token_embed(
    texts: _Texts = None,
    *,
    file: _File = None,
    output: _Output = None,
    force: Force = False,
    as_json: JsonOfValues = False,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="query, document, or another prompt of the checkpoint."),
    ] = None,
    normalize: Normalize = None,
    options: RowOptions,
) -> None:
    """Print or write a vector for each token (ColBERT)."""
    given: dict[str, Any] = {"prompt_name": prompt_name, "normalize": normalize}
    _TOKEN_EMBED.run(texts, file, options, output=output, force=force, as_json=as_json, **given)


@with_options
def token_classify(
    texts: _Texts = None,
    *,
    file: _File = None,
    output: _Output = None,
    force: Force = False,
    as_json: JsonPerText = False,
    options: RowOptions,
) -> None:
    """Print the tokens of texts with their best labels.

    `--output` writes the logits of all labels instead.
    """
    command = _TOKEN_LABELS if output is None else _TOKEN_LOGITS
    command.run(texts, file, options, output=output, force=force, as_json=as_json)


@with_options
def hidden(
    texts: _Texts = None,
    *,
    file: _File = None,
    output: _Output = None,
    force: Force = False,
    as_json: JsonOfValues = False,
    options: RowOptions,
) -> None:
    """Print or write the last hidden state of each token."""
    _HIDDEN.run(texts, file, options, output=output, force=force, as_json=as_json)


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
    instruction: Instruction = None,
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
    given = {
        "normalize": normalize,
        "prompt_name": prompt_name,
        "instruction": instruction,
        "dimensions": dimensions,
    }
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
