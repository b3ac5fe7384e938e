"""How fast the arena is beside the same program without it: in one process, request by request in turns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from varlen_bench.memory.cases import Case, Ids
from varlen_bench.memory.systems import Run, Vectors, load_runner, planned, unplanned

# Of the case's rounds, every so many-th is run.
_ROUND_STEP = 3


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    """Seconds without the arena over seconds with it: the median over rounds, and its 20th and 80th percentile."""

    ratio: float
    ratio_p20: float
    ratio_p80: float
    requests: int


def measure_speed(folder: Path, device: str, case: Case) -> SpeedFigures:
    """Return the ratio over a third of the requests.

    Raises:
        RuntimeError: the answers differ.
    """
    runner = load_runner(folder, device, case.max_tokens)
    without = unplanned(runner.program, runner.device, case.max_tokens)
    runs = planned(runner).run, without.run
    compare(runs, case.longest(), turn=0)
    rounds = case.rounds()[::_ROUND_STEP]
    ratios = []
    for numbers in rounds:
        spent = [compare(runs, case.ids(number), turn) for turn, number in enumerate(numbers)]
        ratios.append(sum(fresh for _, fresh in spent) / sum(ours for ours, _ in spent))
    low, median, high = np.percentile(ratios, [20, 50, 80])
    return SpeedFigures(float(median), float(low), float(high), sum(map(len, rounds)))


def compare(runs: tuple[Run, Run], ids: Ids, turn: int) -> tuple[float, float]:
    """Return the seconds of both on one request; who begins changes with the turn.

    Raises:
        RuntimeError: their answers differ.
    """
    seconds, answers = [0.0, 0.0], list[Vectors | None]([None, None])
    for which in (0, 1) if turn % 2 == 0 else (1, 0):
        began = time.perf_counter()
        answers[which] = runs[which](ids)
        seconds[which] = time.perf_counter() - began
    with_arena, without = answers
    assert with_arena is not None
    assert without is not None
    if not np.array_equal(with_arena, without):
        raise RuntimeError(f"the answers to a request of shape {ids.shape} differ")
    return seconds[0], seconds[1]
