"""The command of a task: its help, its options, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from varlen_client.wire import Floats

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of a command.

    Attributes:
        kind: type of its value.
        names: its names on the command line; by default -- and its own.
        default: ... if it is needed.
        min, max: bounds of a number.
    """

    kind: Any
    help: str
    names: tuple[str, ...] = ()
    default: object = None
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Generic[_Answer]):
    """A command that sends rows, and prints or writes an answer to each.

    Attributes:
        task: task of the models that it asks, which is its name.
        words: words about these models, of what they do, make and are, in messages.
        summary: sentence of `varlen --help`, with which its own help begins.
        details: the rest of its help.
        synonyms: names that other programs have for it.
        question: help of the argument before the texts, with which each is a pair; without it each is alone.
        texts, file, json: help of the arguments that every command has.
        progress: word before the progress bar.
        flags: its own options.
        sent: function that returns the options of the method, given its own options by name.
        fields: function that returns the fields of an answer's JSON object, beside its text.
        lines: function that returns the lines of an answer; each is printed after the text.
        written: name of the arrays, one for each text, that a file gets; without it there is no file.
        written_by: task that answers with these arrays, if it is another one.
    """

    task: str
    words: tuple[str, str, str]
    summary: str
    details: str = ""
    synonyms: str = ""
    question: str = ""
    texts: str = "Texts."
    file: str = "Send the lines of this UTF-8 file; - is stdin."
    json: str = "Print one JSON object per text."
    progress: str = "sending"
    flags: Mapping[str, Flag] = field(default_factory=dict)
    sent: Callable[..., dict[str, Any]] = dict
    fields: Callable[[_Answer], dict[str, object]] = lambda _: {}
    lines: Callable[[_Answer], Iterable[str]] = lambda _: ()
    written: str = ""
    written_by: Any = None

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.task.replace("_", "-")


PROMPT_NAME = Flag(str | None, "Prompt of the checkpoint that is put before texts.")
NORMALIZE = Flag(bool | None, "Scale vectors to length 1; default: the model decides.")
ALL_VALUES = "Print one JSON object per text, with all values."


def shown_score(score: float) -> str:
    """Return a score in four decimals, or like 2.1e-09 below 0.001."""
    return f"{score:.1e}" if 0 < abs(score) < 1e-3 else f"{score:.4f}"


def exact_values(array: Floats) -> Any:
    """Return an array as lists of numbers that restore its exact fp32 values."""
    # nine digits do
    return np.vectorize(lambda value: float(f"{value:.9g}"), otypes=[float])(array).tolist()


def array_fields(written: str) -> Callable[[Floats], dict[str, object]]:
    """Return the fields of an array, named after the first of these words."""
    return lambda array: {written.partition(" ")[0]: exact_values(array)}


def array_lines(rows: str) -> Callable[[Floats], Iterable[str]]:
    """Return the line of an array, whose rows are for instance tokens."""
    return lambda array: [f"{array.shape[0]} {rows} of {array.shape[1]} values"]
