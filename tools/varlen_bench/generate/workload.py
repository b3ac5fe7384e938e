"""Requests to generate: prompts, output lengths, and when they arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from varlen_bench.harness.arrivals import exponential_times
from varlen_tools.workloads import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    Mix,
    fitting_divisor,
    read_generation_trace,
    token_ids,
)

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
        return replace(self, due=exponential_times(len(self.prompts), rate, seed))

    def checked(self) -> Workload:
        """Return the short part whose tokens are compared between systems."""
        step = max(1, len(self.prompts) // _CHECKED_REQUESTS)
        outputs = [min(count, _CHECKED_TOKENS) for count in self.outputs[::step]]
        return Workload("checked", self.prompts[::step], outputs, [0.0] * len(outputs))


def uniform_workload(count: int, vocabulary: int, positions: int, seed: int) -> Workload:
    """Return requests of uniform prompt and output lengths, all at once."""
    lengths = _uniform(PROMPT_TOKENS, count, seed), _uniform(ANSWER_TOKENS, count, seed + 1)
    prompts, outputs = _fitted(*lengths, positions=positions)
    label = f"prompts {PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]}, outputs {ANSWER_TOKENS[0]}-{ANSWER_TOKENS[1]}"
    return Workload(label, token_ids(prompts, vocabulary, seed), outputs, [0.0] * count)


def trace_workload(path: Path, count: int, vocabulary: int, positions: int, seed: int) -> Workload:
    """Return consecutive requests of a trace, all at once.

    If more than one request in a hundred exceeds `positions`, all lengths are divided so that 99 % fit.

    Args:
        path: see `read_generation_trace`.

    Raises:
        ValueError: see `read_generation_trace`.
    """
    pairs = [(each.tokens, each.generated or 1) for each in read_generation_trace(path)]
    divisor = fitting_divisor([sum(pair) for pair in pairs], positions)
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
