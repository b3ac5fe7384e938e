"""The commands of tasks of rows, such as `varlen embed` and `varlen rerank`.

Most are made from the table of tasks; a function below is the command of its name instead.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

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
from varlen_client.cli.requests import RequestOptions, RowOptions, with_options
from varlen_client.sync import Client
from varlen_client.tasks import TASKS
from varlen_client.tasks.command import (
    ALL_VALUES,
    NORMALIZE,
    PROMPT_NAME,
    Command,
    Flag,
    shown_score,
)
from varlen_client.tasks.labels import ACTIVATION, RANK, TOP_K, Activation
from varlen_client.tasks.row_task import RowTask
from varlen_client.tasks.vectors import EMBED
from varlen_client.wire import Floats, Inputs, Pairs, query_and_documents

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_Instruction = Annotated[
    str | None, typer.Option(help="What the model has to find, if it reads instructions.")
]
_FORCE = "Overwrite the output file."


def _ask(
    client: Client, task: RowTask[Any], rows: Inputs | Pairs, file: Path | None, **given: Any
) -> Any:
    """Return the answers to rows; lines of a file have a progress bar."""
    progress = "sending" if task.command is None else task.command.progress
    with show_progress(progress, len(rows), shown=file is not None) as on_progress:
        return client.ask(task.of(rows, {**given, "on_progress": on_progress}))


def _show(
    task: RowTask[Any], rows: Sequence[str], answers: Iterable[Any], *, as_json: bool
) -> None:
    """Print the answers of rows."""
    command = task.command
    assert command is not None
    for text, answer in zip(rows, answers, strict=True):
        if as_json:
            typer.echo(json.dumps({"text": text, **command.fields(answer)}, ensure_ascii=False))
            continue
        for line in command.lines(answer):
            typer.echo(f"{shorten(text)}  {line}")


def __getattr__(name: str) -> Callable[..., None]:
    """Return the command of a task that has no function here."""
    for task in TASKS:
        if task.command is not None and task.command.task == name:
            return _made(task, task.command)
    raise AttributeError(name)


def _made(task: RowTask[Any], command: Command[Any]) -> Callable[..., None]:
    """Return the command of a task."""

    def run(
        texts: Sequence[str] | None,
        *,
        file: Path | None,
        as_json: bool,
        options: RequestOptions,
        question: str = "",
        output: Path | None = None,
        force: bool = False,
        **flags: Any,
    ) -> None:
        rows = texts_or_full_lines(texts, file)
        sent = query_and_documents(question, rows) if command.question else rows
        if output is not None:
            if as_json:
                usage_error("give either --output or --json")
            check_output(output, force=force)
        asked = task if output is None else command.written_by or task
        with options.connect() as client:
            answers = _ask(client, asked, sent, file, **options.arguments, **command.sent(**flags))
        if output is None:
            _show(task, rows, answers, as_json=as_json)
        else:
            named = {str(number): array for number, array in enumerate(answers)}
            write_file(output, lambda stream: np.savez(stream, **named), force=force)
            print_message(f"wrote the {command.written} of {len(rows)} texts to {output}")

    run.__name__, run.__doc__ = command.task, f"{command.summary}\n\n{command.details}"
    run.__signature__ = inspect.Signature(list(_parameters(task, command)))  # type: ignore[attr-defined]  # inspect's own hook
    return with_options(run)


def _parameters(task: RowTask[Any], command: Command[Any]) -> Iterator[inspect.Parameter]:
    """Yield the arguments and options of a command, with what typer knows of them."""
    texts = Annotated[list[str] | None, typer.Argument(help=command.texts)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if command.question:
        question = Annotated[str, typer.Argument(help=command.question)]
        yield inspect.Parameter("question", kind, annotation=question)
    yield inspect.Parameter("texts", kind, default=None, annotation=texts)
    own = {"file": Flag(Path | None, command.file)}
    if command.written:
        text = "Write one fp32 array per text here, .npz, named 0, 1 and so on."
        own["output"] = Flag(Path | None, text)
        own["force"] = Flag(bool, _FORCE, ("--force",), default=False)
    own |= {**command.flags, "as_json": Flag(bool, command.json, ("--json",), default=False)}
    for name, flag in own.items():
        default = inspect.Parameter.empty if flag.default is ... else flag.default
        yield inspect.Parameter(name, _KEYWORD, default=default, annotation=_typed(flag))
    can_cut = "truncate" in task.options.__annotations__
    yield inspect.Parameter(
        "options", _KEYWORD, annotation=RowOptions if can_cut else RequestOptions
    )


def _typed(flag: Flag) -> Any:
    """Return the type of an option, with what typer knows of it."""
    option = typer.Option(*flag.names, help=flag.help, min=flag.min, max=flag.max)
    return Annotated[flag.kind, option]


@with_options
def rerank(
    query: Annotated[str, typer.Argument(help="What the documents are compared with.")],
    documents: Annotated[list[str] | None, typer.Argument(help="Documents to rank.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Rank the lines of this UTF-8 file; - is stdin.")
    ] = None,
    activation: Annotated[Activation | None, typer.Option(help=ACTIVATION.help)] = "auto",
    instruction: _Instruction = None,
    top_k: Annotated[int | None, typer.Option(min=1, help=TOP_K.help)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
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
            typer.echo(f"{shown_score(scores[row]):>8}  {row + 1:4}  {shorten(rows[row])}")


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
    force: Annotated[bool, typer.Option("--force", help=_FORCE)] = False,
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Skip empty lines; by default they are an error.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help=ALL_VALUES)] = False,
    normalize: Annotated[bool | None, typer.Option(help=NORMALIZE.help)] = None,
    prompt_name: Annotated[str | None, typer.Option(help=PROMPT_NAME.help)] = None,
    instruction: _Instruction = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Keep only the first N dimensions; default: all.")
    ] = None,
    spans: Annotated[
        str | None,
        typer.Option(help="Vectors of these parts of one text, as JSON: [[0, 40], [41, 90]]."),
    ] = None,
    windows: Annotated[
        bool, typer.Option("--windows", help="Read texts that are longer than the model in parts.")
    ] = False,
    window_overlap: Annotated[
        int | None, typer.Option(min=0, help="Tokens that two windows share.")
    ] = None,
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="The file is one text, not one in each line.")
    ] = False,
    rows_per_request: Annotated[
        int | None, typer.Option(min=1, help="Default: 32, or the model's limit if that is less.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum requests in flight.")
    ] = DEFAULT_CONCURRENCY,
    options: RowOptions,
) -> None:
    """Print or write the vectors of texts."""
    if whole_file:
        rows = ["\n".join(texts_or_lines(texts, file))]
    else:
        rows = _without_empty(texts_or_lines(texts, file), file, skip=skip_empty)
    parts = None if spans is None else _spans(spans)
    if output is not None:
        check_output(output, force=force)
    start = time.monotonic()
    connection = {"rows_per_request": rows_per_request, "concurrency": concurrency}
    given = {
        "normalize": normalize,
        "prompt_name": prompt_name,
        "instruction": instruction,
        "dimensions": dimensions,
        "spans": parts,
        "windows": windows or None,
        "window_overlap": window_overlap,
    }
    with options.connect(**connection) as client:
        vectors = _ask(client, EMBED, rows, file, **options.arguments, **given)
    seconds = time.monotonic() - start
    if parts is not None:
        rows = [rows[0][begin:end] for begin, end in parts]
    if output is None:
        _show(EMBED, rows, vectors, as_json=as_json)
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


def _spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of the command line."""
    try:
        return [(int(begin), int(end)) for begin, end in json.loads(text)]
    except (TypeError, ValueError):
        usage_error(f"--spans is {shorten(text)}; write JSON such as [[0, 40], [41, 90]]")


def _without_empty(rows: Sequence[str], file: Path | None, *, skip: bool) -> list[str]:
    """Return the rows without empty lines of a file, an error unless skipped."""
    for number, row in enumerate(rows, start=1):
        if file is not None and not skip and not row.strip():
            usage_error(f"{file}, line {number}: empty (skip empty lines with --skip-empty)")
    return [row for row in rows if file is None or row.strip()]
