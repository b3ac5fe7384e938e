"""When requests arrive and how long they are: the same for a seed on any machine."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Uniform lengths by the name of their mix: shortest and longest, in tokens.
UNIFORM = {"uniform": (5, 500), "short": (2, 100)}
# Share of a trace's requests that are to fit the model; the rest is cut.
_FITTING = 0.99


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of requests, in tokens.

    Attributes:
        name: short, as an option spells it.
        label: what the rows say.
        lengths: of a trace, in order of arrival; a uniform mix has one of each.
        in_order: requests follow each other as `lengths` do; otherwise they are drawn evenly.
    """

    name: str
    label: str
    lengths: tuple[int, ...]
    in_order: bool = False

    def take(self, count: int, seed: int) -> list[int]:
        """Return the lengths of so many requests.

        Drawn ones are the mix's quantiles in random order: any two draws of one count hold the same work.
        """
        if self.in_order:
            first = random.Random(seed).randrange(len(self.lengths))
            return [self.lengths[(first + i) % len(self.lengths)] for i in range(count)]
        ordered = sorted(self.lengths)
        drawn = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
        random.Random(seed).shuffle(drawn)
        return drawn


def uniform_mix(name: str, limit: int) -> Mix:
    """Return a mix of `UNIFORM`, cut to what the model takes.

    Raises:
        ValueError: there is no such mix.
    """
    if name not in UNIFORM:
        raise ValueError(f"no lengths are called {name!r}; there are {', '.join(UNIFORM)}")
    shortest, longest = UNIFORM[name]
    longest = min(longest, limit)
    return Mix(name, f"uniform {shortest}-{longest}", tuple(range(shortest, longest + 1)))


def trace_mix(path: Path, limit: int) -> Mix:
    """Return the lengths of a trace, in its order.

    They are the first column of whole numbers. Where more than one in a hundred is longer than the model takes, all
    are divided by what makes them fit; the longest are then cut.

    Raises:
        ValueError: the file has no such column.
    """
    lengths = _lengths(path)
    fitting = sorted(lengths)[math.ceil(_FITTING * len(lengths)) - 1]
    divisor = max(1.0, fitting / limit)
    scaled = tuple(min(limit, max(1, round(length / divisor))) for length in lengths)
    label = f"trace {path.stem}" + (f" / {divisor:.3g}" if divisor > 1 else "")
    return Mix("trace", label, scaled, in_order=True)


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Return times of arrival in `seconds`, ascending: a Poisson process of `rate`, given how many arrive.

    Exactly `rate * seconds` arrive, so that what is offered is what was asked for; given their number, the times of
    a Poisson process are independent and uniform.
    """
    draw = random.Random(seed)
    return sorted(draw.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))


def token_ids(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Return random ids of each length; 0, the padding of most vocabularies, is not among them."""
    draw = random.Random(seed)
    ids = range(1, vocabulary)
    return [draw.choices(ids, k=length) for length in lengths]


def model_limits(model: Path) -> tuple[int, int]:
    """Return the most tokens that a checkpoint has positions for, and the size of its vocabulary."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config["max_position_embeddings"]), int(config["vocab_size"])


def _lengths(path: Path) -> list[int]:
    with path.open(newline="", encoding="utf-8") as file:
        table = [row for row in csv.reader(file) if row]
    for column in zip(*table[1:], strict=False):
        if all(cell.strip().isdecimal() for cell in column):
            return [int(cell) for cell in column]
    raise ValueError(f"{path.name} has no column of whole numbers below its heading")
