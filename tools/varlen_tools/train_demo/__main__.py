"""The command: `python -m varlen_tools.train_demo gpt2 --output FOLDER`."""

import time
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from varlen_tools.train_demo.save import WEIGHTS, save_checkpoint
from varlen_tools.train_demo.text import python_documents
from varlen_tools.train_demo.train import DEFAULT, encode, train, train_tokenizer


class Family(str, Enum):
    """Families of models that can be trained."""

    gpt2 = "gpt2"


def main(
    family: Annotated[Family, typer.Argument(help="Family of the model.")],
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = DEFAULT.steps,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and samples.")] = DEFAULT.seed,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint.")] = False,
) -> None:
    """Train a small model on Python's documentation and write its checkpoint."""
    if (output / WEIGHTS).exists() and not force:
        raise typer.BadParameter(f"{output} holds a checkpoint already; --force replaces it")
    training = replace(DEFAULT, steps=steps, seed=seed)
    began = time.perf_counter()
    documents = python_documents()
    tokenizer = train_tokenizer(documents, training.shape.vocabulary)
    token_ids = encode(tokenizer, documents)
    console = Console(stderr=True)
    console.print(f"training {family.value} on {len(token_ids):,} tokens of Python's documentation")
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, loss=float("nan"))
        model = train(
            training, token_ids, lambda step, loss: progress.update(bar, completed=step, loss=loss)
        )
    save_checkpoint(output, model, training.shape, tokenizer)
    console.print(f"{output} is ready after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
