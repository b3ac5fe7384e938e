"""CSV rows, keys of the BENCH line, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from varlen_bench.beam.step import StepTimes
from varlen_bench.beam.systems import BEAMS, OURS, TRANSFORMERS
from varlen_bench.compare.results import (
    Result,
    best_peer,
    csv_row,
    empty_row,
    result_of,
    speed_ratio,
)
from varlen_bench.compare.results import tables as result_tables
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import ratio, rounded
from varlen_bench.peers.checkpoints import TRANSFORMER_BASE
from varlen_tools.tables import Table

BASE, DATES = TRANSFORMER_BASE.name, "tiny_dates"

_STEP_FIGURES = ("step_us", "blocks_us", "torch_us", "reorder_us", "survivors")
_FIGURES = (
    "sentences_per_second sentences_per_second_p20 sentences_per_second_p80 latency_p50_ms latency_p99_ms tokens "
    "machine_gflops step_us blocks_us torch_us reorder_us survivors step_vs_torch"
).split()
_COLUMNS = (
    *"model workload arrivals rate system batch requests rounds equal_hypotheses".split(),
    *_FIGURES,
    *("calibration", "note"),
)
# Of the BENCH line: B and V of the step in a server of translations.
_STEP = (8, 32_000)


def csv_rows(results: Iterable[Result], steps: Iterable[StepTimes]) -> list[dict[str, Cell]]:
    """Return a row for each result, and one for each shape of the isolated step."""
    rows = [csv_row(result, _COLUMNS, equal_hypotheses=_equal(result)) for result in results]
    for step in steps:
        shape = f"{step.sequences}x{BEAMS}x{step.vocabulary}"
        about = {"model": "step alone", "workload": shape, "system": "beam_step"}
        times = {name: getattr(step, name) for name in _STEP_FIGURES}
        rows.append(empty_row(_COLUMNS, **about, **times, step_vs_torch=step.speedup))
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


def tables(rows: Sequence[Mapping[str, Cell]]) -> list[Table]:
    """Return a table of each model and kind of arrivals, the fastest system first."""
    about = ("workload", "system", "batch", "rate", "equal_hypotheses", "requests")
    columns = (*about, *_FIGURES, "note")
    return result_tables(rows, columns, by=("model", "arrivals"), speed="sentences_per_second")


def equal_latency_ratio(results: Sequence[Result]) -> float | None:
    """Return the rate of varlen over the rate of transformers, at equal p99 latency.

    Between two measured rates the latency counts as linear. The rate is at most what varlen serves at once, since a
    higher one lasts only as long as the workload. None if one of both did not run.

    Args:
        results: results of one model.
    """
    poisson = [result for result in results if result.arrivals == "poisson" and result.rounds]
    theirs = result_of(poisson, TRANSFORMERS)
    ours = sorted(
        (result.rate or 0.0, result.median("latency_p99_ms") or 0.0)
        for result in poisson
        if result.system.name == OURS
    )
    at_once = result_of((each for each in results if each.arrivals == "at once"), OURS)
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


def _figures(results: Sequence[Result]) -> dict[str, Cell]:
    at_once = [result for result in results if result.arrivals == "at once"]
    ours, peer = result_of(at_once, OURS), best_peer(at_once)
    return {
        "vs_transformers": speed_ratio(ours, result_of(at_once, TRANSFORMERS)),
        "vs_transformers_poisson": rounded(equal_latency_ratio(results)),
        "vs_best_peer": speed_ratio(ours, peer),
        "best_peer": peer.system.name if peer else None,
        "equal_hypotheses": rounded(ratio(_equal(ours), ours.requests) if ours else None),
    }


def _equal(result: Result) -> int | None:
    """Return the answers that equal the reference, in the worst round."""
    return min((int(each["equal_hypotheses"]) for each in result.rounds), default=None)
