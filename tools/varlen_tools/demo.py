"""The demo: a real server answers over both protocols: `python -m varlen_tools.demo`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from varlen_client import Client, VarlenClientError
from varlen_client.cli.rows import print_similarity
from varlen_client.wire import Floats
from varlen_tools.local_server import LocalServer, ServerError, end_on_sigterm

SENTENCES = [
    "A man is eating food.",
    "Someone has a meal.",
    "The girl is carrying a baby.",
    "A woman holds her child in her arms.",
    "Two people race their horses across an open field.",
    "The stock market fell sharply on Monday, after a week in which every trader had waited to sell.",
]
PROMPT = "In Python, a list"
MAX_TOKENS = 80
DATES = [
    "the 3rd of March, 2021",
    "03/14/99",
    "Wednesday, 1 Jan 2020",
    "am einunddreißigsten Dezember 1999",
    "le vingt et un février 2000",
]
# Largest cosine distance: both protocols carry the same numbers, but two runs may be batched differently.
TOLERANCE = 1e-3


def embed(protocol: str, url: str, model: str) -> Floats:
    """Return unit vectors of the sentences, `[sentences, hidden]`, and print the time of a warm call."""
    with Client(url, model) as client:
        client.embed(SENTENCES, normalize=True)
        start = time.perf_counter()
        vectors = client.embed(SENTENCES, normalize=True)
        milliseconds = 1000 * (time.perf_counter() - start)
    print(f"{protocol}: {len(vectors)} vectors of {vectors.shape[1]} in {milliseconds:.1f} ms")
    return vectors


def compare(server: LocalServer, model: str) -> None:
    """Embed the sentences over gRPC and HTTP, and print how similar they are.

    Raises:
        ServerError: a request fails, or the answers differ.
    """
    with _errors_with_log(server):
        grpc, http = embed("gRPC", server.grpc_url, model), embed("HTTP", server.http_url, model)
    distance = abs(1 - float((grpc * http).sum(axis=1).min()))
    # also false for a NaN
    if not distance <= TOLERANCE:
        raise ServerError(f"gRPC and HTTP differ by {distance:.1e} in cosine; allowed: {TOLERANCE}")
    print(f"both protocols agree (largest cosine distance: {distance:.0e})")
    print_similarity(SENTENCES, grpc)


def stream(server: LocalServer, model: str) -> None:
    """Print a generated text as it comes, and the times of its tokens.

    Raises:
        ServerError: the request fails.
    """
    print(f"{model}: {PROMPT}", end="", flush=True)
    tokens, start = 0, time.perf_counter()
    first = float("nan")
    with _errors_with_log(server), Client(server.grpc_url, model) as client:
        for part in client.stream(PROMPT, max_tokens=MAX_TOKENS, temperature=0.7, seed=0):
            if not tokens:
                first = time.perf_counter() - start
            tokens += len(part.token_ids)
            print(part.text, end="", flush=True)
    seconds = time.perf_counter() - start
    print(f"\nstreamed {tokens} tokens in {seconds:.2f} s, the first after {1000 * first:.0f} ms")


def translate(server: LocalServer, model: str) -> None:
    """Print dates, and what the model makes of them.

    Raises:
        ServerError: the request fails.
    """
    start = time.perf_counter()
    with _errors_with_log(server), Client(server.grpc_url, model) as client:
        answers = client.translate(DATES)
    milliseconds = 1000 * (time.perf_counter() - start)
    for date, answer in zip(DATES, answers, strict=True):
        print(f"{model}: {date} -> {answer.text}")
    print(f"rewrote {len(DATES)} dates in {milliseconds:.0f} ms")


@contextmanager
def _errors_with_log(server: LocalServer) -> Iterator[None]:
    """Raise ServerError with the server's log for a request that fails."""
    try:
        yield
    except VarlenClientError as error:
        raise ServerError(f"{error}\n{server.log_tail()}") from None


class Part(Enum):
    """What the demo shows."""

    embed = "embed"
    generate = "generate"
    translate = "translate"


def main(
    parts: Annotated[
        list[Part] | None, typer.Argument(help="What is shown; default: everything.")
    ] = None,
    repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    model: Annotated[str, typer.Option(help="Name of an embedding model in it.")] = "minilm",
    generator: Annotated[
        str, typer.Option(help="Name of a model of the task generate in it.")
    ] = "tiny_gpt2",
    translator: Annotated[
        str, typer.Option(help="Name of a model that rewrites dates in it.")
    ] = "tiny_dates",
    timeout: Annotated[
        float, typer.Option(help="Longest start of the server, in seconds.")
    ] = 120.0,
) -> None:
    """Start a server, embed sentences, stream a text, rewrite dates, stop the server."""
    shows = {
        Part.embed: (model, compare),
        Part.generate: (generator, stream),
        Part.translate: (translator, translate),
    }
    chosen = [shows[part] for part in parts or Part]
    try:
        for name, _ in chosen:
            if not (repository / name / "1" / "config.json").is_file():
                raise ServerError(f"{repository / name} has no checkpoint; run `make setup`")
        names = [name for name, _ in chosen]
        print(f"starting tritonserver with {', '.join(names)} of {repository}", flush=True)
        start = time.perf_counter()
        with LocalServer([repository / name for name in names]) as server:
            server.wait_ready(timeout)
            print(f"tritonserver is ready after {time.perf_counter() - start:.1f} s")
            for name, show in chosen:
                show(server, name)
    except ServerError as error:
        print(f"demo: {error}")
        raise typer.Exit(1) from None
    print("tritonserver has stopped")


if __name__ == "__main__":
    end_on_sigterm()
    typer.run(main)
