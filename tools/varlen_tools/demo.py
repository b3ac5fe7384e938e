"""The demo: a real server answers over both protocols: `python -m varlen_tools.demo`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from varlen_client import Client, VarlenClientError
from varlen_client.cli import similarity
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
    """Embed the sentences over gRPC and HTTP.

    Raises:
        ServerError: a request fails, or the answers differ.
    """
    try:
        grpc, http = embed("gRPC", server.grpc_url, model), embed("HTTP", server.http_url, model)
    except VarlenClientError as error:
        raise ServerError(f"{error}\n{server.log_tail()}") from None
    distance = abs(1 - float((grpc * http).sum(axis=1).min()))
    # also false for a NaN
    if not distance <= TOLERANCE:
        raise ServerError(f"gRPC and HTTP differ by {distance:.1e} in cosine; allowed: {TOLERANCE}")
    print(f"both protocols agree (largest cosine distance: {distance:.0e})")


def main(
    repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    model: Annotated[str, typer.Option(help="Name of an embedding model in it.")] = "minilm",
    timeout: Annotated[
        float, typer.Option(help="Longest start of the server, in seconds.")
    ] = 120.0,
) -> None:
    """Start a server, embed sentences over gRPC and HTTP, print their similarity, stop the server."""
    try:
        if not (repository / model / "1" / "config.json").is_file():
            raise ServerError(f"{repository / model} has no checkpoint; run `make setup`")
        print(f"starting tritonserver with {repository}", flush=True)
        start = time.perf_counter()
        with LocalServer(repository) as server:
            server.wait_ready(timeout)
            print(f"tritonserver is ready after {time.perf_counter() - start:.1f} s")
            compare(server, model)
            similarity(SENTENCES, url=server.grpc_url, model=model)
    except ServerError as error:
        print(f"demo: {error}")
        raise typer.Exit(1) from None
    print("tritonserver has stopped")


if __name__ == "__main__":
    end_on_sigterm()
    typer.run(main)
