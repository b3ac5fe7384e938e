"""Costs of steps, measured with a model on this machine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from varlen.costs.model import non_negative_least_squares
from varlen.scheduling.batch import Batch
from varlen_bench.simulate.costs import StepCosts
from varlen_bench.simulate.steps import Step, simulate
from varlen_bench.workloads import Arrival
from varlen_tools.model_source import find_source

# Requests that come together, and the length of their prompts as a share of the longest.
_GROUPS = ((1, 0.1), (1, 1.0), (2, 1.0), (8, 0.25), (16, 0.1), (32, 0.02))
_LONGEST_PROMPT = 1000
_GENERATED = 16
# Each step counts with its median.
_REPEATS = 3
# Seconds between groups, so that each runs by itself.
_GAP = 1e6


def measure(folder: Path, settings: Mapping[str, str]) -> tuple[StepCosts, float]:
    """Return the costs of a model's steps on this machine, and their median relative error.

    Raises:
        CheckpointError, ConfigError: the model cannot be loaded to generate.
    """
    # imports torch, which nothing else here needs
    from varlen.service.generation import GeneratorParts
    from varlen.service.service import Service
    from varlen.telemetry.metrics import Stats

    source = find_source(folder, settings)
    service = Service.load(GeneratorParts, source.checkpoint, source.config, Stats())
    runner, info = service.model.runner, service.model.runner.info

    def seconds(step: Batch) -> float:
        began = time.perf_counter()
        runner.launch_batch(step)()
        return time.perf_counter() - began

    longest = min(_LONGEST_PROMPT, info.max_sequence_tokens - _GENERATED)
    arrivals = [
        Arrival(_GAP * number, max(1, round(share * longest)), generated=_GENERATED)
        for number, (count, share) in enumerate(_GROUPS * _REPEATS)
        for _ in range(count)
    ]
    config = replace(
        source.config,
        kv_block_tokens=info.block_size,
        max_step_tokens=info.max_batch_tokens,
    )
    try:
        return fit(simulate(arrivals, config, info.num_blocks, seconds).steps)
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
