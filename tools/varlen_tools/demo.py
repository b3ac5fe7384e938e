"""The demo: a real server answers over both protocols: `python -m varlen_tools.demo`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from varlen_client import Client, VarlenClientError
from varlen_tools.local_server import LocalServer, ServerError, end_on_sigterm

SENTENCES = (
    "A man is eating food.",
    "Someone has a meal.",
    "The girl is carrying a baby.",
    "A woman holds her child in her arms.",
    "Two people race their horses across an open field.",
    "The stock market fell sharply on Monday, after a week in which nobody had wanted to sell.",
)
# Both protocols carry the same fp32 numbers, but two runs may be batched differently.
TOLERANCE = 1e-3


class DemoError(Exception):
    """The server's answers are wrong."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Vectors `[sentences, hidden]` that one protocol returned, and the seconds of a warm call."""

    protocol: str
    vectors: NDArray[np.float32]
    seconds: float


def ask(protocol: str, url: str, model: str) -> Answer:
    """Return the vectors of the sentences; the second call is the warm one."""
    with Client(url, model=model) as client:
        client.embed(SENTENCES)
        start = time.perf_counter()
        vectors = client.embed(SENTENCES)
        return Answer(protocol, vectors, time.perf_counter() - start)


def check(answers: list[Answer]) -> float:
    """Return the largest cosine distance between the answers.

    Raises:
        DemoError: an answer has another shape or no finite values, or the distance is above TOLERANCE.
    """
    for answer in answers:
        vectors = answer.vectors
        if vectors.ndim != 2 or len(vectors) != len(SENTENCES) or not np.isfinite(vectors).all():
            raise DemoError(
                f"{answer.protocol} returned {vectors.shape}; expected {len(SENTENCES)} finite vectors"
            )
    units = [_unit(answer.vectors) for answer in answers]
    worst = max(float(1 - (units[0] * other).sum(axis=1).min()) for other in units)
    if worst > TOLERANCE:
        names = " and ".join(answer.protocol for answer in answers)
        raise DemoError(f"{names} differ by {worst:.1e} in cosine; at most {TOLERANCE:.0e} allowed")
    return max(worst, 0.0)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths: NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths)


def similarity_table(vectors: NDArray[np.float32]) -> Table:
    """Return the cosine similarity of all pairs of sentences."""
    units = _unit(vectors)
    similarity = units @ units.T
    table = Table(title="cosine similarity", title_justify="left")
    table.add_column("sentence", max_width=52)
    for column in range(len(SENTENCES)):
        table.add_column(str(column + 1), justify="right")
    for row, sentence in enumerate(SENTENCES):
        table.add_row(f"{row + 1}  {sentence}", *(_cell(value) for value in similarity[row]))
    return table


def _cell(value: float) -> str:
    style = "bold green" if value > 0.4 else "dim"
    return f"[{style}]{value:.2f}[/]"


def run(console: Console, repository: Path, model: str, timeout: float) -> None:
    """Print one server's answers over gRPC and HTTP.

    Raises:
        ServerError: it does not start.
        DemoError: its answers are wrong.
    """
    start = time.perf_counter()
    with LocalServer(repository) as server:
        with console.status(f"starting tritonserver with {repository}"):
            server.wait_ready(timeout)
        console.print(f"tritonserver is ready after {time.perf_counter() - start:.1f} s")
        try:
            answers = [ask("gRPC", server.grpc_url, model), ask("HTTP", server.http_url, model)]
            difference = check(answers)
        except (VarlenClientError, DemoError) as error:
            raise DemoError(f"{error}\n{server.log_tail()}") from error
        console.print(similarity_table(answers[0].vectors))
        for answer in answers:
            count, hidden = answer.vectors.shape
            milliseconds = answer.seconds * 1000
            console.print(
                f"{answer.protocol}: {count} vectors of {hidden} in {milliseconds:.1f} ms"
            )
        console.print(f"both protocols agree (largest cosine distance: {difference:.0e})")
        with console.status("stopping tritonserver"):
            server.stop()
    console.print("tritonserver has stopped")


def main(
    repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    model: Annotated[str, typer.Option(help="Name of an embedding model in it.")] = "minilm",
    timeout: Annotated[
        float, typer.Option(help="Longest start of the server, in seconds.")
    ] = 120.0,
) -> None:
    """Start a server, embed sentences over gRPC and HTTP, print their similarity, stop the server."""
    console = Console(highlight=False, soft_wrap=True)
    if not (repository / model / "1" / "config.json").is_file():
        console.print(
            f"demo: {repository / model} has no checkpoint; run `make setup`", style="red"
        )
        raise typer.Exit(1)
    try:
        run(console, repository, model, timeout)
    except (ServerError, DemoError) as error:
        console.print(f"demo: {error}", style="red", markup=False)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    end_on_sigterm()
    typer.run(main)
