"""The command: `python -m varlen_tools.train_demo gpt2 --output FOLDER`, or `dates`."""

import random
import re
import time
from dataclasses import replace
from enum import Enum
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import typer
from rich.console import Console

from varlen_tools.train_demo.dates import FORMS, held_out_examples
from varlen_tools.train_demo.loop import Report
from varlen_tools.train_demo.save import WEIGHTS, save_gpt2, save_marian
from varlen_tools.train_demo.train import DEFAULT, encode, train, train_tokenizer
from varlen_tools.train_demo.train_dates import (
    DEFAULT_DATES,
    exact_matches,
    train_date_tokenizer,
    train_dates,
)

# Held-out dates per form in the measure that the command prints.
_DATES_PER_FORM = 20
_PROGRESS_SECONDS = 3.0
_SHORTEST_PARAGRAPH = 80
# Code, markup, grammar and tables. A model that sees few tokens learns plain sentences first.
_NO_PROSE = re.compile(r'["*()_<>{}\[\]=|“”0-9]')


class Family(str, Enum):
    """Models that can be trained."""

    gpt2 = "gpt2"
    dates = "dates"


def python_documents() -> list[str]:
    """Return the plain prose of each topic of `help()`, a line for each paragraph.

    Every Python installation holds these topics; they are the same for one Python version.
    """
    documents = ("\n\n".join(_paragraphs(topics[name])) for name in sorted(topics))
    return [document for document in documents if document]


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs that are whole sentences, each on one line."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in paragraphs if _is_prose(part)]


def _is_prose(paragraph: str) -> bool:
    is_sentence = paragraph[:1].isupper() and paragraph[-1:] in {".", ":"}
    is_long = len(paragraph) >= _SHORTEST_PARAGRAPH
    return is_sentence and is_long and not _NO_PROSE.search(paragraph)


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
    model = train(training, token_ids, _progress(output, training.steps, console))
    save_gpt2(output, model, training.shape, tokenizer)


def _make_dates(output: Path, steps: int | None, seed: int, console: Console) -> None:
    training = replace(DEFAULT_DATES, steps=steps or DEFAULT_DATES.steps, seed=seed)
    tokenizer = train_date_tokenizer(training.shape.vocabulary, seed)
    console.print(f"training Marian on dates in {len(FORMS)} written forms")
    model = train_dates(training, tokenizer, _progress(output, training.steps, console))
    save_marian(output, model, training.shape, tokenizer)
    examples = held_out_examples(_DATES_PER_FORM, random.Random(seed))
    exact = exact_matches(model, tokenizer, examples)
    console.print(f"{exact:,} of {len(examples):,} held-out dates are rewritten exactly (greedy)")


def _progress(output: Path, steps: int, console: Console) -> Report:
    """Return what prints a line every few seconds, also beside another training."""
    began = printed = time.perf_counter()

    def report(step: int, loss: float) -> None:
        nonlocal printed
        now = time.perf_counter()
        if step == steps or now - printed >= _PROGRESS_SECONDS:
            printed = now
            console.print(f"{output}: step {step} of {steps}, {now - began:.0f} s, loss {loss:.2f}")

    return report


if __name__ == "__main__":
    typer.run(main)
