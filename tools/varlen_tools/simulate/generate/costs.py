"""Costs of steps for the simulator: given, or measured with a model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from varlen.costs.model import non_negative_least_squares
from varlen.scheduling.sequence import StepBatch
from varlen_tools.model_source import find_source
from varlen_tools.simulate.command import parse_numbers
from varlen_tools.simulate.generate.run import Step, kv_tokens, simulate
from varlen_tools.workloads import Arrival

_MICROSECONDS = 1e6
# Requests that come together, and the length of their prompts as a share of the longest.
_GROUPS = ((1, 0.1), (1, 1.0), (2, 1.0), (8, 0.25), (16, 0.1), (32, 0.02))
_LONGEST_PROMPT = 1000
_GENERATED = 16
# Each step counts with its median.
_REPEATS = 3
# Seconds between groups, so that each runs alone.
_GAP = 1e6


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: constant, per token, and per KV token that it reads.

    Attention's arithmetic in long chunks of prompts counts as a part of their tokens.
    """

    step: float
    token: float
    kv_token: float

    @classmethod
    def parse(cls, text: str) -> StepCosts:
        """Return the costs of three numbers of microseconds, as `str` writes them.

        Raises:
            ValueError: they are not three, or one is negative, or a step or a token costs nothing.
        """
        numbers = parse_numbers("costs", text)
        if len(numbers) != 3 or min(numbers) < 0 or numbers[0] + numbers[1] == 0:
            raise ValueError(
                f'costs are "{text}"; allowed: microseconds of a step, a token and a KV token, such as 20000,700,5'
            )
        return cls(*(number / _MICROSECONDS for number in numbers))

    def __str__(self) -> str:
        numbers = (self.step, self.token, self.kv_token)
        return ",".join(f"{float(f'{_MICROSECONDS * number:.3g}'):g}" for number in numbers)

    def seconds(self, step: StepBatch) -> float:
        """Return the seconds of a step."""
        return self.of(step.shape.tokens, kv_tokens(step))

    def of(self, tokens: int, kv_tokens: int) -> float:
        """Return the seconds of a step of these sizes."""
        return self.step + self.token * tokens + self.kv_token * kv_tokens


def measure(folder: Path, settings: Mapping[str, str]) -> tuple[StepCosts, float]:
    """Return the costs of a model's steps on this machine, and their median relative error.

    Args:
        folder: a checkpoint or a model of a repository; see `find_source`.
        settings: engine parameters that replace the configured ones.

    Raises:
        CheckpointError, ConfigError: the model cannot be loaded to generate.
    """
    # imports torch, which nothing else here needs
    from varlen.service.generation import GenerationService
    from varlen.telemetry.metrics import Stats

    source = find_source(folder, settings)
    service = GenerationService.load(source.checkpoint, source.config, Stats())
    runner = service.runner

    def seconds(step: StepBatch) -> float:
        began = time.perf_counter()
        runner.run_batch(step)
        return time.perf_counter() - began

    longest = min(_LONGEST_PROMPT, runner.max_sequence_tokens - _GENERATED)
    arrivals = [
        Arrival(_GAP * number, max(1, round(share * longest)), generated=_GENERATED)
        for number, (count, share) in enumerate(_GROUPS * _REPEATS)
        for _ in range(count)
    ]
    config = replace(
        source.config,
        kv_block_tokens=runner.kv.block_size,
        max_step_tokens=runner.max_step_tokens,
    )
    try:
        return fit(simulate(arrivals, config, runner.kv.num_blocks, seconds).steps)
    finally:
        service.close()


def fit(steps: Iterable[Step]) -> tuple[StepCosts, float]:
    """Return the costs of least squared relative error, and the median of that error.

    Steps of the same sizes count with their median.
    """
    by_size: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        by_size[step.tokens, step.kv_tokens].append(step.seconds)
    seconds = np.array([median(each) for each in by_size.values()])
    terms = np.array([(1.0, *sizes) for sizes in by_size]) / seconds[:, None]
    coefficients = non_negative_least_squares(terms)
    errors = np.abs(terms @ coefficients - 1)
    return StepCosts(*coefficients.tolist()), float(np.median(errors))
