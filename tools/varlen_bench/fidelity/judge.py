"""Judges the answers of an engine: equal to the original's, silently different, or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from varlen.request.vectors import scores_of
from varlen_bench.harness.rows import Cell
from varlen_tools.doctor.comparison import compare_values

Result: TypeAlias = Literal["equal", "different", "refused", "no original"]
# An answer for each input.
Rows: TypeAlias = Sequence[Any]
_CELL = re.compile(
    r"(?P<result>equal|different|refused|no original)(?: (?P<number>[\d.e+-]+|nan|inf))?(?:: (?P<remark>.*))?"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an engine did with one kind of input of a checkpoint.

    Attributes:
        difference: the largest one of numbers, relative to the largest number.
        remark: the engine's message, or how the answers differ.
    """

    result: Result
    difference: float | None = None
    remark: str = ""

    def text(self) -> str:
        """Return the cell of the CSV, such as `different 0.3: the prompt is left out`."""
        number = "" if self.difference is None else f" {self.difference:.2g}"
        return f"{self.result}{number}" + (f": {self.remark}" if self.remark else "")

    @classmethod
    def read(cls, text: str) -> Verdict:
        """Return the verdict of a cell."""
        found = _CELL.fullmatch(text)
        if found is None:
            raise ValueError(f"cell {text!r} is no verdict")
        result: Any = found["result"]
        number = found["number"]
        return cls(result, None if number is None else float(number), found["remark"] or "")


@dataclass(frozen=True, slots=True)
class Answered:
    """What an engine did with a checkpoint.

    Attributes:
        corpus: digest of the entry.
        verdicts: the verdict on each kind of input.
    """

    checkpoint: str
    corpus: str
    task: str
    tokenizer: str
    engine: str
    engine_version: str
    verdicts: Mapping[str, Verdict]

    def row(self, kinds: Sequence[str]) -> Mapping[str, Cell]:
        """Return the row of the CSV, with a column for each kind of input."""
        names = ("checkpoint", "corpus", "task", "tokenizer", "engine", "engine_version")
        cells = {
            kind: self.verdicts[kind].text() if kind in self.verdicts else "" for kind in kinds
        }
        return {**{name: getattr(self, name) for name in names}, **cells}


def judge(task: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Verdict:
    """Return the verdict on the answers to one kind of input.

    Args:
        task: task of the checkpoint.
        expected, actual: `rows`, an answer for each input, or `error`. `activation`: the function whose values
            `actual` has, where the original has logits.
    """
    if "error" in expected:
        return Verdict("no original", None, str(expected["error"]))
    if "error" in actual:
        return Verdict("refused", None, str(actual["error"]))
    ours, theirs = actual["rows"], expected["rows"]
    if len(ours) != len(theirs):
        return Verdict("different", None, f"{len(ours)} answers to {len(theirs)} inputs")
    if task == "generate":
        return _of_tokens(ours, theirs)
    if "activation" in actual:
        theirs = scores_of(np.asarray(theirs, np.float32), actual["activation"])
    return _of_numbers(task, ours, theirs)


def _of_tokens(ours: Rows, theirs: Rows) -> Verdict:
    wrong = sum(list(a) != list(b) for a, b in zip(ours, theirs, strict=True))
    if wrong:
        return Verdict("different", None, f"tokens of {wrong} prompts differ")
    return Verdict("equal", 0.0)


def _of_numbers(task: str, ours: Rows, theirs: Rows) -> Verdict:
    arrays = [
        [np.atleast_1d(np.asarray(row, np.float32)) for row in rows] for rows in (ours, theirs)
    ]
    # a vector of zeros, or of NaN, is what the original answers to nothing
    if any(not np.isfinite(row).all() for row in arrays[1]):
        return Verdict("no original", None, "NaN in the original's answer")
    found = compare_values(task, "", actual=arrays[0], expected=arrays[1], dtype="fp32")
    return Verdict("equal" if found.agrees else "different", found.difference, found.remark)
