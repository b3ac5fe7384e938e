"""Requests to generate: prompts and output lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from varlen_bench.compare.passes import Requests
from varlen_tools.workloads import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    Mix,
    fitting_divisor,
    read_generation_trace,
    token_ids,
)

_CHECKED_REQUESTS, _CHECKED_TOKENS = 6, 12


def checked(requests: Requests) -> Requests:
    """Return the short part whose tokens are compared between systems."""
    part = requests.part(range(0, len(requests), max(1, len(requests) // _CHECKED_REQUESTS)))
    limits = [min(limit, _CHECKED_TOKENS) for limit in part.limits]
    return Requests.at_once("checked", part.prompts, limits)


def uniform_requests(count: int, vocabulary: int, positions: int, seed: int) -> Requests:
    """Return requests of uniform prompt and output lengths, all at once."""
    lengths = _uniform(PROMPT_TOKENS, count, seed), _uniform(ANSWER_TOKENS, count, seed + 1)
    prompts, outputs = _fitted(*lengths, positions=positions)
    label = f"prompts {PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]}, outputs {ANSWER_TOKENS[0]}-{ANSWER_TOKENS[1]}"
    return Requests.at_once(label, token_ids(prompts, vocabulary, seed), outputs)


def trace_requests(path: Path, count: int, vocabulary: int, positions: int, seed: int) -> Requests:
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
    return Requests.at_once(label, token_ids(prompts, vocabulary, seed), outputs)


def _uniform(limits: tuple[int, int], count: int, seed: int) -> list[int]:
    return Mix("", "", tuple(range(limits[0], limits[1] + 1))).take(count, seed)


def _fitted(
    prompts: Sequence[int], outputs: Sequence[int], *, positions: int
) -> tuple[list[int], list[int]]:
    """Return lengths that fit the positions of a model: outputs first, then prompts."""
    short = [min(count, positions - 1) for count in outputs]
    fitting = [min(length, positions - count) for length, count in zip(prompts, short, strict=True)]
    return fitting, short
