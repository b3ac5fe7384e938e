"""Workloads: lengths and arrival times of requests, the same on any machine for a seed.

Benchmarks use a `Mix` with `poisson_times`: loads of one size hold the same work.
The simulator draws each `Arrival` and its length independently: `poisson_arrivals` and `burst_arrivals`.
For generation it scales one stream to each rate: `generation_arrivals` or `generation_trace`, and `at_rate`.
"""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path

# Words of texts: each is a token of the tokenizer "wordpiece" of `fidelity.tokenizers`.
WORDS = "the cat river house water small word".split()
# Mixes by name: ranges of lengths in tokens, and how often each of these lengths counts. In `mixed` nine in ten are
# short.
MIXES = {
    "uniform": ((range(5, 501), 1),),
    "short": ((range(2, 101), 1),),
    "mixed": ((range(5, 61), 32), (range(300, 501), 1)),
}
# Share of a trace's requests that fit the model after scaling; longer ones are clamped.
_FITTING = 0.99
# Shortest and longest prompt and answer of generation, in tokens, as in Orca's evaluation.
PROMPT_TOKENS, ANSWER_TOKENS = (32, 256), (1, 128)
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?")
# Mean number of arrivals in a burst.
_BURST = 20


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of requests, in tokens.

    Attributes:
        name: short, as an option spells it.
        label: description for tables and rows.
        lengths: lengths of a trace, in order of arrival, or each length as often as it counts.
        in_order: requests follow each other as `lengths` do; otherwise they are drawn evenly.
    """

    name: str
    label: str
    lengths: tuple[int, ...]
    in_order: bool = False

    def take(self, count: int, seed: int) -> list[int]:
        """Return the lengths of `count` requests.

        Drawn lengths are the mix's quantiles in random order: any two draws of one count hold the same work.
        """
        if self.in_order:
            first = random.Random(seed).randrange(len(self.lengths))
            return [self.lengths[(first + i) % len(self.lengths)] for i in range(count)]
        ordered = sorted(self.lengths)
        drawn = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
        random.Random(seed).shuffle(drawn)
        return drawn


def named_mix(name: str, limit: int) -> Mix:
    """Return a mix of `MIXES`, without lengths above `limit`.

    Raises:
        ValueError: there is no such mix.
    """
    if name not in MIXES:
        raise ValueError(f"no lengths are called {name!r}; there are {', '.join(MIXES)}")
    parts = [(range(each.start, min(each.stop, limit + 1)), times) for each, times in MIXES[name]]
    ranges = " and ".join(f"{each.start}-{each[-1]}" for each, _ in parts if each)
    lengths = tuple(length for each, times in parts for length in each for _ in range(times))
    return Mix(name, f"{'uniform' if len(parts) == 1 else name} {ranges}", lengths)


def trace_mix(path: Path, limit: int) -> Mix:
    """Return the lengths of a trace, in order: its first column of whole numbers.

    If more than one length in a hundred exceeds `limit`, all are divided so that 99 % fit. The rest is clamped.

    Raises:
        ValueError: the file has no such column.
    """
    lengths = _first_whole_column(path)
    divisor = fitting_divisor(lengths, limit)
    scaled = tuple(min(limit, max(1, round(length / divisor))) for length in lengths)
    label = f"trace {path.stem}" + (f" / {divisor:.3g}" if divisor > 1 else "")
    return Mix("trace", label, scaled, in_order=True)


def fitting_divisor(lengths: Sequence[int], limit: int) -> float:
    """Return the divisor, at least 1, with which 99 % of the lengths fit a limit."""
    fitting = sorted(lengths)[math.ceil(_FITTING * len(lengths)) - 1]
    return max(1.0, fitting / limit)


def poisson_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Return ascending arrival times of a Poisson process that has `rate * seconds` arrivals.

    Given their number, the arrival times of a Poisson process are independent and uniform.
    """
    numbers = random.Random(seed)
    return sorted(numbers.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))


def next_poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """Return the first `count` times of a Poisson process of `rate` arrivals per second."""
    numbers = random.Random(seed)
    return list(accumulate(numbers.expovariate(rate) for _ in range(count)))


def token_ids(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Return random token ids of each length, without 0, the padding of most vocabularies."""
    numbers = random.Random(seed)
    ids = range(1, vocabulary)
    return [numbers.choices(ids, k=length) for length in lengths]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of rows of one length.

    Attributes:
        generated: length of each answer in tokens; None for tasks that generate none.
    """

    at: float
    tokens: int
    priority: int = 0
    deadline_seconds: float | None = None
    rows: int = 1
    generated: int | None = None


def poisson_arrivals(count: int, rate: float, lengths: Sequence[int], seed: int) -> list[Arrival]:
    """Return independent arrivals at `rate` per second."""
    numbers, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at += numbers.expovariate(rate)
        arrivals.append(Arrival(at, numbers.choice(lengths)))
    return arrivals


def burst_arrivals(count: int, rate: float, lengths: Sequence[int], seed: int) -> list[Arrival]:
    """Return arrivals at `rate` per second on average, in bursts that are a Poisson process."""
    numbers, at = random.Random(seed), 0.0
    arrivals: list[Arrival] = []
    while len(arrivals) < count:
        at += numbers.expovariate(rate / _BURST)
        size = 1 + int(numbers.expovariate(1 / (_BURST - 1)))
        size = min(size, count - len(arrivals))
        arrivals += [Arrival(at, numbers.choice(lengths)) for _ in range(size)]
    return arrivals


def with_deadline(arrivals: Sequence[Arrival], seconds: float | None) -> list[Arrival]:
    """Return the arrivals with this deadline."""
    return [replace(arrival, deadline_seconds=seconds) for arrival in arrivals]


def generation_arrivals(count: int, seed: int) -> list[Arrival]:
    """Return arrivals at 1 per second, with the lengths of Orca's evaluation."""
    numbers = random.Random(seed)
    lengths = [
        (numbers.randint(*PROMPT_TOKENS), numbers.randint(*ANSWER_TOKENS)) for _ in range(count)
    ]
    arrivals = [Arrival(0.0, tokens, generated=generated) for tokens, generated in lengths]
    return with_poisson_times(arrivals, seed)


def generation_trace(path: Path, count: int, seed: int) -> list[Arrival]:
    """Return consecutive requests of a trace, at their own times.

    Args:
        seed: seed of the first request.
    """
    arrivals = read_generation_trace(path)
    first = random.Random(seed).randint(0, max(0, len(arrivals) - count))
    return arrivals[first : first + count]


def read_generation_trace(path: Path) -> list[Arrival]:
    """Return the requests of a trace in order of arrival.

    Args:
        path: CSV file with the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, as the Azure traces have.

    Raises:
        ValueError: a column is missing, or a cell cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        arrivals = [
            Arrival(_seconds(row["TIMESTAMP"]), tokens, generated=generated)
            for row in rows
            # nothing is scheduled for a request without a prompt or an answer
            if (tokens := int(row["ContextTokens"])) > 0
            and (generated := int(row["GeneratedTokens"])) > 0
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is no trace of requests ({error!r}); allowed: CSV with the columns TIMESTAMP,"
            " ContextTokens and GeneratedTokens"
        ) from None
    if not arrivals:
        raise ValueError(f"{path.name} has no requests")
    return sorted(arrivals, key=lambda arrival: arrival.at)


def with_poisson_times(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """Return the arrivals at the times of a Poisson process of 1 per second."""
    times = next_poisson_times(len(arrivals), 1.0, seed)
    return [replace(arrival, at=at) for arrival, at in zip(arrivals, times, strict=True)]


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return the arrivals with gaps scaled to `rate` per second, the first at 0."""
    first, last = arrivals[0].at, arrivals[-1].at
    factor = (len(arrivals) - 1) / (rate * (last - first)) if last > first else 0.0
    return [replace(arrival, at=factor * (arrival.at - first)) for arrival in arrivals]


def _seconds(timestamp: str) -> float:
    """Return a time of a trace in seconds, with any number of digits."""
    found = _TIMESTAMP.match(timestamp)
    if found is None:
        raise ValueError(f'a time is "{timestamp}"')
    whole = datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc)
    return whole.timestamp() + float(f"0{found[2] or ''}")


def _first_whole_column(path: Path) -> list[int]:
    """Return the first column of a CSV file that holds only whole numbers."""
    with path.open(newline="", encoding="utf-8") as file:
        headings, *rows = [row for row in csv.reader(file) if row] or [[]]
    for _, *cells in zip(headings, *rows, strict=False):
        if cells and all(cell.strip().isdecimal() for cell in cells):
            return [int(cell) for cell in cells]
    raise ValueError(f"{path.name} has no column of whole numbers below its heading")
