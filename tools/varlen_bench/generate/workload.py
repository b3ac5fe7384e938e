"""Requests to generate: prompts, output lengths, and when they arrive."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from varlen_tools.workloads import Mix, token_ids

_PROMPTS, _OUTPUTS = (32, 256), (1, 128)
# Share of a trace's requests that fit the model after scaling; longer ones are clamped.
_FITTING = 0.99
_CHECKED_REQUESTS, _CHECKED_TOKENS = 6, 12


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        label: description for tables and rows.
        prompts: token ids of each request.
        outputs: number of tokens that each request generates.
        due: when each request arrives, in seconds from the beginning, ascending.
    """

    label: str
    prompts: list[list[int]]
    outputs: list[int]
    due: list[float]

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(self.outputs)

    def arriving(self, rate: float, seed: int) -> Workload:
        """Return the same requests as a Poisson process of `rate` requests/s."""
        numbers, at, due = random.Random(seed), 0.0, []
        for _ in self.prompts:
            at += numbers.expovariate(rate)
            due.append(at)
        return replace(self, due=due)

    def checked(self) -> Workload:
        """Return the short part whose tokens are compared between systems."""
        step = max(1, len(self.prompts) // _CHECKED_REQUESTS)
        outputs = [min(count, _CHECKED_TOKENS) for count in self.outputs[::step]]
        return Workload("checked", self.prompts[::step], outputs, [0.0] * len(outputs))


def uniform_workload(count: int, vocabulary: int, positions: int, seed: int) -> Workload:
    """Return requests of uniform prompt and output lengths, all at once."""
    lengths = _uniform(_PROMPTS, count, seed), _uniform(_OUTPUTS, count, seed + 1)
    prompts, outputs = _fitted(*lengths, positions=positions)
    label = f"prompts {_PROMPTS[0]}-{_PROMPTS[1]}, outputs {_OUTPUTS[0]}-{_OUTPUTS[1]}"
    return Workload(label, token_ids(prompts, vocabulary, seed), outputs, [0.0] * count)


def trace_workload(path: Path, count: int, vocabulary: int, positions: int, seed: int) -> Workload:
    """Return consecutive requests of a trace, all at once.

    Its first two columns of whole numbers are prompt and output lengths. If more than one request in a hundred exceeds
    `positions`, all lengths are divided so that 99 % fit.

    Raises:
        ValueError: the file has no two such columns.
    """
    found = _whole_columns(path)
    if len(found) < 2 or not found[0]:
        raise ValueError(f"{path.name} has no two columns of whole numbers: prompts and outputs")
    pairs = list(zip(found[0], found[1], strict=True))
    longest = sorted(map(sum, pairs))[math.ceil(_FITTING * len(pairs)) - 1]
    divisor = max(1.0, longest / positions)
    first = random.Random(seed).randrange(len(pairs))
    taken = [pairs[(first + i) % len(pairs)] for i in range(count)]
    lengths = [[max(1, round(length / divisor)) for length in pair] for pair in taken]
    prompts, outputs = _fitted(
        [prompt for prompt, _ in lengths], [count for _, count in lengths], positions=positions
    )
    label = f"trace {path.stem}" + (f" / {divisor:.3g}" if divisor > 1 else "")
    return Workload(label, token_ids(prompts, vocabulary, seed), outputs, [0.0] * count)


def _uniform(limits: tuple[int, int], count: int, seed: int) -> list[int]:
    return Mix("", "", tuple(range(limits[0], limits[1] + 1))).take(count, seed)


def _fitted(
    prompts: Sequence[int], outputs: Sequence[int], *, positions: int
) -> tuple[list[int], list[int]]:
    """Return lengths that fit the positions of a model: outputs first, then prompts."""
    short = [min(count, positions - 1) for count in outputs]
    fitting = [min(length, positions - count) for length, count in zip(prompts, short, strict=True)]
    return fitting, short


def _whole_columns(path: Path) -> list[list[int]]:
    """Return the columns of a CSV file that hold only whole numbers, without their headings."""
    with path.open(newline="", encoding="utf-8") as file:
        _, *rows = [row for row in csv.reader(file) if row] or [[]]
    columns = zip(*rows, strict=False)
    return [
        [int(cell) for cell in column]
        for column in columns
        if all(cell.strip().isdecimal() for cell in column)
    ]
