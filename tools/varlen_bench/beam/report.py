"""CSV rows, keys of the BENCH line, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from varlen_bench.beam.step import StepTimes
from varlen_bench.beam.systems import BEAMS, OURS, TRANSFORMERS
from varlen_bench.harness.generating import System, SystemResult
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import Spread, paired_ratio, ratio, rounded
from varlen_bench.harness.tables import Table
from varlen_bench.peers.checkpoints import TRANSFORMER_BASE

BASE, DATES = TRANSFORMER_BASE.name, "tiny_dates"

_LATENCIES = ("latency_p50_ms", "latency_p99_ms")
_FIGURES = (
    "sentences_per_second",
    "sentences_per_second_p20",
    "sentences_per_second_p80",
    *_LATENCIES,
    "tokens",
    "machine_gflops",
)
_STEP_FIGURES = ("step_us", "blocks_us", "torch_us", "reorder_us", "survivors")
# Of the BENCH line: B and V of the step in a server of translations.
_STEP = (8, 32_000)


@dataclass(slots=True)
class Result(SystemResult):
    """A result of beam search; its speed is in sentences/s.

    Attributes:
        equal: answers that equal those of the reference, in the worst round.
    """

    speed: ClassVar[str] = "sentences_per_second"

    equal: int | None = None


def csv_rows(results: Iterable[Result], steps: Iterable[StepTimes]) -> list[dict[str, Cell]]:
    """Return a row for each result, and one for each shape of the step alone."""
    rows = [_row(result) for result in results]
    empty: dict[str, Cell] = dict.fromkeys(
        _row(Result(System("", "varlen", "fp32", "iteration"), "", "", "at once", 0))
    )
    for step in steps:
        shape = f"{step.sequences}x{BEAMS}x{step.vocabulary}"
        row = {**empty, "model": "step alone", "workload": shape, "system": "beam_step"}
        row |= {name: getattr(step, name) for name in _STEP_FIGURES}
        rows.append(row | {"step_vs_torch": step.speedup})
    return rows


def bench_figures(
    results: Sequence[Result], steps: Sequence[StepTimes], models: Sequence[str]
) -> dict[str, Cell]:
    """Return the keys of the BENCH line; the date model's begin with `dates_`."""
    figures: dict[str, Cell] = {}
    for model in models:
        prefix = "dates_" if model == DATES else ""
        found = _figures([result for result in results if result.model == model])
        figures |= {f"{prefix}{key}": value for key, value in found.items()}
    alone = next((each for each in steps if (each.sequences, each.vocabulary) == _STEP), None)
    figures["step_vs_torch"] = rounded(alone.speedup if alone else None)
    figures["step_us"] = rounded(alone.step_us if alone else None, 1)
    return figures


def tables(rows: Sequence[dict[str, Cell]]) -> list[Table]:
    """Return a table of each model and kind of arrivals, the fastest system first."""
    about = ("workload", "system", "batch", "rate", "equal_hypotheses", "requests")
    columns = (*about, *_FIGURES, *_STEP_FIGURES, "step_vs_torch", "note")
    fastest_first = sorted(rows, key=lambda row: -float(row["sentences_per_second"] or 0))
    kinds = dict.fromkeys((row["model"], row["arrivals"]) for row in rows)
    return [
        Table.of(
            ", ".join(str(word) for word in kind if word),
            columns,
            [row for row in fastest_first if (row["model"], row["arrivals"]) == kind],
        )
        for kind in kinds
    ]


def equal_latency_ratio(results: Sequence[Result]) -> float | None:
    """Return the rate of varlen over that of transformers, at equal p99 latency.

    Between two measured rates the latency counts as linear. The rate is at most what varlen serves at once, since a
    higher one lasts only as long as the workload. None if one of both did not run.

    Args:
        results: of one model.
    """
    poisson = [result for result in results if result.arrivals == "poisson" and result.rounds]
    theirs = next((each for each in poisson if each.system.name == TRANSFORMERS), None)
    ours = sorted(
        (result.rate or 0.0, result.median("latency_p99_ms") or 0.0)
        for result in poisson
        if result.system.name == OURS
    )
    at_once = _at_once(results, OURS)
    if theirs is None or not theirs.rate or not ours or at_once is None:
        return None
    limit = theirs.median("latency_p99_ms") or 0.0
    best = 0.0
    before = (0.0, 0.0)
    for rate, latency in ours:
        if latency > limit:
            share = max(0.0, limit - before[1]) / (latency - before[1])
            best = before[0] + share * (rate - before[0])
            break
        best, before = rate, (rate, latency)
    return min(best, statistics.median(at_once.speeds)) / theirs.rate


def _row(result: Result) -> dict[str, Cell]:
    figures: dict[str, Cell] = dict.fromkeys(_FIGURES)
    if result.rounds:
        spread = Spread.of(result.speeds)
        speeds = (spread.median, spread.p20, spread.p80)
        figures |= dict(zip(_FIGURES, speeds, strict=False))
        figures |= {name: result.median(name) for name in (*_LATENCIES, "tokens", "machine_gflops")}
    return {
        "model": result.model,
        "workload": result.label,
        "arrivals": result.arrivals,
        "rate": result.rate,
        "system": result.system.name,
        "batch": result.size or None,
        "requests": result.requests,
        "rounds": len(result.rounds),
        "equal_hypotheses": result.equal,
        **figures,
        **dict.fromkeys((*_STEP_FIGURES, "step_vs_torch")),
        "calibration": result.calibration,
        "note": result.note,
    }


def _figures(results: Sequence[Result]) -> dict[str, Cell]:
    ours = _at_once(results, OURS)
    peer = _best_peer(results)
    return {
        "vs_transformers": _speed_ratio(ours, _at_once(results, TRANSFORMERS)),
        "vs_transformers_poisson": rounded(equal_latency_ratio(results)),
        "vs_best_peer": _speed_ratio(ours, peer),
        "best_peer": peer.system.name if peer else None,
        "equal_hypotheses": rounded(ratio(ours.equal, ours.requests) if ours else None),
    }


def _best_peer(results: Iterable[Result]) -> Result | None:
    """Return the fastest peer in fp32 that ran at once."""
    peers = (
        result
        for result in results
        if result.arrivals == "at once"
        and result.rounds
        and not result.system.is_ours
        and result.system.precision == "fp32"
    )
    return max(peers, key=lambda result: statistics.median(result.speeds), default=None)


def _at_once(results: Iterable[Result], name: str) -> Result | None:
    return next(
        (
            result
            for result in results
            if result.arrivals == "at once" and result.system.name == name and result.rounds
        ),
        None,
    )


def _speed_ratio(result: Result | None, base: Result | None) -> float | None:
    if result is None or base is None:
        return None
    return rounded(paired_ratio(result.speeds, base.speeds))
