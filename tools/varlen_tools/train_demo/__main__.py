"""The command: `python -m varlen_tools.train_demo gpt2 --output FOLDER`, or `dates`."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from varlen_tools.train_demo.dates import FORMS, held_out_examples
from varlen_tools.train_demo.loop import Report
from varlen_tools.train_demo.save import WEIGHTS, save_gpt2, save_marian
from varlen_tools.train_demo.text import python_documents
from varlen_tools.train_demo.train import DEFAULT, encode, train, train_tokenizer
from varlen_tools.train_demo.train_dates import (
    DEFAULT_DATES,
    exact_matches,
    train_date_tokenizer,
    train_dates,
)

# Held-out dates per form in the measure that the command prints.
_DATES_PER_FORM = 20


class Family(str, Enum):
    """Models that can be trained."""

    gpt2 = "gpt2"
    dates = "dates"


def main(
    family: Annotated[
        Family,
        typer.Argument(help="gpt2 continues text; dates rewrites dates to ISO form (Marian)."),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; the family's own if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and samples.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint.")] = False,
) -> None:
    """Train a small model, on Python's documentation or on written dates, and write its checkpoint."""
    if (output / WEIGHTS).exists() and not force:
        raise typer.BadParameter(f"{output} holds a checkpoint already; --force replaces it")
    began = time.perf_counter()
    console = Console(stderr=True)
    make = {Family.gpt2: _make_gpt2, Family.dates: _make_dates}[family]
    make(output, steps, seed, console)
    console.print(f"{output} is ready after {time.perf_counter() - began:.0f} s")


def _make_gpt2(output: Path, steps: int | None, seed: int, console: Console) -> None:
    training = replace(DEFAULT, steps=steps or DEFAULT.steps, seed=seed)
    documents = python_documents()
    tokenizer = train_tokenizer(documents, training.shape.vocabulary)
    token_ids = encode(tokenizer, documents)
    console.print(f"training gpt2 on {len(token_ids):,} tokens of Python's documentation")
    with _progress(training.steps, console) as report:
        model = train(training, token_ids, report)
    save_gpt2(output, model, training.shape, tokenizer)


def _make_dates(output: Path, steps: int | None, seed: int, console: Console) -> None:
    training = replace(DEFAULT_DATES, steps=steps or DEFAULT_DATES.steps, seed=seed)
    tokenizer = train_date_tokenizer(training.shape.vocabulary, seed)
    console.print(f"training Marian on dates in {len(FORMS)} written forms")
    with _progress(training.steps, console) as report:
        model = train_dates(training, tokenizer, report)
    save_marian(output, model, training.shape, tokenizer)
    examples = held_out_examples(_DATES_PER_FORM, random.Random(seed))
    exact = exact_matches(model, tokenizer, examples)
    console.print(f"{exact:,} of {len(examples):,} held-out dates are rewritten exactly (greedy)")


@contextmanager
def _progress(steps: int, console: Console) -> Iterator[Report]:
    """Show a bar; yields what moves it."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, loss=float("nan"))
        yield lambda step, loss: progress.update(bar, completed=step, loss=loss)


if __name__ == "__main__":
    typer.run(main)
