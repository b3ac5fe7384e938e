"""The command `varlen`: embed texts, compare them, generate text, and show a server's status.

Results go to stdout; progress, messages and errors go to stderr.
Exit codes: 0 success, 1 the server or the request failed, 2 wrong arguments or input file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from varlen_client.aio import DEFAULT_CONCURRENCY
from varlen_client.endpoint import Endpoint
from varlen_client.errors import InvalidUrl, VarlenClientError
from varlen_client.metrics import MetricsSample, fetch_metrics, rates, read_metrics
from varlen_client.session import Status
from varlen_client.sync import Client
from varlen_client.wire import Floats

SHOWN_VALUES = 4
SHOWN_CHARACTERS = 40
SAMPLE_SECONDS = 1.0
METRICS_TIMEOUT_SECONDS = 3.0

app = typer.Typer(
    help="Embed and generate text at a Triton Inference Server that runs the varlen backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Url = Annotated[
    str,
    typer.Option(
        envvar="VARLEN_URL", help="grpc://host:port or http://host:port; grpcs and https use TLS."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(envvar="VARLEN_MODEL", help="Default: the only ready model of the server."),
]
Truncate = Annotated[bool, typer.Option("--truncate", help="Truncate texts that are too long.")]
DeadlineMs = Annotated[
    float | None,
    typer.Option(
        min=0.001, help="Milliseconds for each request; the server refuses those it cannot meet."
    ),
]
Priority = Annotated[int | None, typer.Option(min=0, max=9, help="Larger runs sooner; default: 0.")]
Timeout = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds for the whole command; default: no limit.")
]

DEFAULT_URL = "grpc://127.0.0.1:8001"


def main() -> None:
    """Run the command line."""
    app()


@app.command()
def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to embed.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Embed each line of this UTF-8 file; - is stdin.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the vectors here, [texts, hidden] fp32 .npy.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Skip empty lines; by default they are an error.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text, with all values.")
    ] = False,
    normalize: Annotated[
        bool | None, typer.Option(help="Scale vectors to length 1; default: the model decides.")
    ] = None,
    rows_per_request: Annotated[
        int | None, typer.Option(min=1, help="Default: 32, or the model's limit if that is less.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum requests in flight.")
    ] = DEFAULT_CONCURRENCY,
    url: Url = DEFAULT_URL,
    model: Model = None,
    truncate: Truncate = False,
    deadline_ms: DeadlineMs = None,
    priority: Priority = None,
    timeout: Timeout = None,
) -> None:
    """Embed texts, or the lines of a file, and print or write the vectors."""
    rows = _texts_or_lines(texts or [], file, skip_empty=skip_empty)
    if output is not None:
        _check_output(output, force=force)
    start = time.monotonic()
    with (
        _exit_on_error(),
        Client(url, model, rows_per_request=rows_per_request, concurrency=concurrency) as client,
        _progress(len(rows), shown=file is not None) as on_progress,
    ):
        vectors = client.embed(
            rows,
            normalize=normalize,
            truncate=truncate or None,
            deadline_ms=deadline_ms,
            priority=priority,
            timeout=timeout,
            on_progress=on_progress,
        )
    seconds = time.monotonic() - start
    if output is not None:
        _write_npy(output, vectors, force=force)
        _print_message(
            f"wrote {vectors.shape[0]} vectors of {vectors.shape[1]} values to {output} "
            f"in {seconds:.1f} s ({len(rows) / seconds:.0f} texts/s)"
        )
    elif as_json:
        for text, vector in zip(rows, vectors, strict=True):
            # nine digits restore the exact fp32 value
            values = [float(f"{value:.9g}") for value in vector]
            typer.echo(json.dumps({"text": text, "embedding": values}, ensure_ascii=False))
    else:
        for text, vector in zip(rows, vectors, strict=True):
            typer.echo(f"{_shorten(text)}  {_format_vector(vector)}")


@app.command()
def similarity(
    texts: Annotated[list[str], typer.Argument(help="At least two texts.")],
    *,
    url: Url = DEFAULT_URL,
    model: Model = None,
    truncate: Truncate = False,
    deadline_ms: DeadlineMs = None,
    priority: Priority = None,
    timeout: Timeout = None,
) -> None:
    """Print the cosine similarity of each pair of texts."""
    if len(texts) == 1:
        _usage_error("similarity needs at least two texts")
    with _exit_on_error(), Client(url, model) as client:
        vectors = client.embed(
            texts,
            truncate=truncate or None,
            deadline_ms=deadline_ms,
            priority=priority,
            timeout=timeout,
        )
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
        table.add_row(str(number), escape(_shorten(text)), *cells)
    Console().print(table)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    *,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the text while it is generated.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to generate; default: 16.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the most likely token; default: 1.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Smallest set of tokens with this probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of most likely tokens.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the most likely token's probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; default: another one each time.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with the JSON schema that the answer has to match.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object per answer, or per part of it.")
    ] = False,
    url: Url = DEFAULT_URL,
    model: Model = None,
    deadline_ms: DeadlineMs = None,
    priority: Priority = None,
    timeout: Timeout = None,
) -> None:
    """Generate the answer to a prompt and print it."""
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
        "structured_outputs": None if json_schema is None else {"json": _read_json(json_schema)},
    }
    text = _read_stdin() if prompt == "-" else prompt
    options: dict[str, Any] = {name: each for name, each in sampling.items() if each is not None}
    options |= {"deadline_ms": deadline_ms, "priority": priority, "timeout": timeout}
    given = [{"role": "user", "content": text}] if chat else text
    with _exit_on_error(), Client(url, model) as client:
        parts = client.stream(given, **options) if stream else [client.generate(given, **options)]
        for part in parts:
            if as_json:
                fields = {"text": part.text, "token_ids": part.token_ids}
                ending = {"finish_reason": part.finish_reason}
                typer.echo(json.dumps(fields | ending, ensure_ascii=False))
            else:
                # typer flushes, so each part shows at once
                typer.echo(part.text, nl=False)
    if not as_json:
        typer.echo()


@app.command()
def status(
    *,
    metrics_url: Annotated[
        str | None, typer.Option(help="Default: port 8002 of the server's host, path /metrics.")
    ] = None,
    url: Url = DEFAULT_URL,
    model: Model = None,
) -> None:
    """Print whether server and model are ready, the queue, and current rates.

    The exit code is 1 when the server or the model is not ready.
    """
    with _exit_on_error(), Client(url, model) as client:
        server_status = client.status()
        metrics_url = metrics_url or Endpoint.parse(url).default_metrics_url

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in [
        *_server_lines(url, server_status),
        *(_traffic_lines(metrics_url, server_status.model) if server_status.model else []),
    ]:
        table.add_row(name, escape(value))
    Console().print(table)
    if not (server_status.server_ready and server_status.model_ready):
        raise typer.Exit(1)


def _server_lines(url: str, status: Status) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each line about the server and its models."""
    state = "ready" if status.server_ready else "NOT READY"
    yield "server", f"{state}: {status.server.name} {status.server.version} at {url}"
    if status.model is None:
        yield "model", "NOT READY: the server has no ready model"
    else:
        yield "model", f"{'ready' if status.model_ready else 'NOT READY'}: {status.model}"
    others = [f"{model.name} ({model.state or 'not loaded'})" for model in status.models]
    if len(others) > 1 or not status.model_ready:
        yield "models", ", ".join(others) or "none"


def _traffic_lines(metrics_url: str, model: str) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each line about the queue and the requests of `model`."""
    samples: list[MetricsSample] = []
    for delay in (0.0, SAMPLE_SECONDS):
        time.sleep(delay)
        page = fetch_metrics(metrics_url, timeout=METRICS_TIMEOUT_SECONDS)
        if page is None:
            yield "metrics", f"off, or not at {metrics_url} (see --metrics-url)"
            return
        sample = read_metrics(page, model)
        if sample is None:
            yield "metrics", f"{metrics_url} has no varlen metrics of model {model} yet"
            return
        samples.append(sample)
    before, now = samples
    rate = rates(before, now)
    outcomes = ", ".join(
        f"{name} {count:.0f}" for name, count in sorted(now.requests.items(), key=_ok_first)
    )
    yield "queue", f"{now.queued_requests:.0f} requests, {now.queued_tokens:.0f} tokens"
    yield (
        "rates",
        f"{rate.requests:.1f} requests/s, {rate.sequences:.1f} sequences/s, "
        f"{rate.tokens:.0f} tokens/s",
    )
    yield "requests", outcomes or "none so far"


def _ok_first(outcome: tuple[str, float]) -> tuple[bool, str]:
    return outcome[0] != "ok", outcome[0]


def _texts_or_lines(texts: Sequence[str], file: Path | None, *, skip_empty: bool) -> list[str]:
    """Return the texts of the command line, or the lines of `file`."""
    if bool(texts) == (file is not None):
        _usage_error("give either texts or --file")
    if file is None:
        return list(texts)
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        _usage_error(f"cannot read {file}: {error.strerror}")
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            _usage_error(f"{file}, line {number}: not valid UTF-8")
        if text.strip():
            rows.append(text)
        elif not skip_empty:
            _usage_error(f"{file}, line {number}: empty (skip empty lines with --skip-empty)")
    if not rows:
        _usage_error(f"{file} has no text")
    return rows


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        _usage_error("stdin is not valid UTF-8")


def _read_json(file: Path) -> object:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        _usage_error(f"cannot read {file}: {error.strerror}")
    except ValueError as error:
        _usage_error(f"{file} is not JSON: {error}")


def _check_output(output: Path, *, force: bool) -> None:
    if not output.parent.is_dir():
        _usage_error(f"{output.parent} is not a folder")
    if output.is_dir():
        _usage_error(f"{output} is a folder")
    if output.exists() and not force:
        _usage_error(f"{output} exists (overwrite it with --force)")


def _write_npy(output: Path, vectors: Floats, *, force: bool) -> None:
    """Write the vectors to a temporary file, then rename it: no reader sees a part."""
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as stream:
            np.save(stream, vectors)
            stream.flush()
            os.fsync(stream.fileno())
        if not force and output.exists():
            _fail(f"{output} appeared while embedding; nothing was written")
        part.replace(output)
    except OSError as error:
        _fail(f"cannot write {output}: {error.strerror}")
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal; yield its update function."""
    console = Console(stderr=True)
    columns = (
        TextColumn("embedding"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as bar:
        task = bar.add_task("embedding", total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Turn the client's errors into a message and an exit code."""
    try:
        yield
    except InvalidUrl as error:
        _usage_error(str(error))
    except VarlenClientError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    _print_message(f"error: {message}")
    raise typer.Exit(1)


def _usage_error(message: str) -> NoReturn:
    _print_message(f"error: {message}")
    raise typer.Exit(2)


def _print_message(message: str) -> None:
    """Print one line to stderr."""
    typer.echo(" ".join(message.split()), err=True)


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def _format_vector(vector: Floats) -> str:
    values = ", ".join(f"{value:.4f}" for value in vector[:SHOWN_VALUES])
    more = ", …" if len(vector) > SHOWN_VALUES else ""
    return f"{len(vector)} dims  [{values}{more}]"


if __name__ == "__main__":
    main()
