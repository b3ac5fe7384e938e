"""CSV rows, keys of the BENCH line, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from varlen_bench.generate.systems import OURS, REQUEST_LEVEL
from varlen_bench.harness.generating import System, SystemResult
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import Spread, paired_ratio, ratio, rounded
from varlen_bench.harness.tables import Table

TINY_GPT2 = "tiny_gpt2"

_TIMES = [f"{name}_p{percent}_ms" for name in ("ttft", "per_token", "gap") for percent in (50, 99)]
_FIGURES = (
    "tokens_per_second",
    "tokens_per_second_p20",
    "tokens_per_second_p80",
    *_TIMES,
    "machine_gflops",
)


@dataclass(slots=True)
class Result(SystemResult):
    """A result of generation; its speed is in tokens/s."""

    speed: ClassVar[str] = "tokens_per_second"

    tokens: int = 0
    equal_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a decode step, and of the fastest possible; or why not."""

    model: str
    seconds: float | None = None
    limit: float | None = None
    note: str = ""


def csv_rows(results: Iterable[Result], steps: Iterable[Step]) -> list[dict[str, Cell]]:
    """Return a row for each result, and one for the decode step of each model."""
    rows = [_row(result) for result in results]
    empty: dict[str, Cell] = dict.fromkeys(_row(_NO_RESULT))
    for step in steps:
        row = {**empty, "model": step.model, "system": OURS, "arrivals": "decode step"}
        row |= {"step_ms": _ms(step.seconds), "limit_ms": _ms(step.limit), "note": step.note}
        rows.append(row)
    return rows


def bench_figures(
    results: Sequence[Result], steps: Sequence[Step], models: Sequence[str]
) -> dict[str, Cell]:
    """Return the keys of the BENCH line; the demo model's begin with its name."""
    figures: dict[str, Cell] = {}
    for model in models:
        prefix = f"{TINY_GPT2}_" if model == TINY_GPT2 else ""
        step = next((step for step in steps if step.model == model), Step(model))
        found = _figures([result for result in results if result.model == model])
        found["decode_fraction_of_limit"] = rounded(ratio(step.limit, step.seconds))
        figures |= {f"{prefix}{key}": value for key, value in found.items()}
    return figures


def best_peer(results: Iterable[Result], *, static: bool = False) -> Result | None:
    """Return the fastest peer in fp32 that ran; static: of transformers' padded batches."""
    peers = (
        result
        for result in results
        if result.rounds and not result.system.is_ours and result.system.precision == "fp32"
    )
    chosen = (result for result in peers if result.system.is_static or not static)
    return max(chosen, key=lambda result: statistics.median(result.speeds), default=None)


def tables(rows: Sequence[dict[str, Cell]]) -> list[Table]:
    """Return a table of each model and kind of arrivals, the fastest system first."""
    columns = ("system", "batch", "equal_tokens", *_FIGURES, "step_ms", "limit_ms", "note")
    fastest_first = sorted(rows, key=lambda row: -float(row["tokens_per_second"] or 0))
    kinds = dict.fromkeys((row["model"], row["arrivals"]) for row in rows)
    return [
        Table.of(
            f"{model}, {arrivals}",
            columns,
            [row for row in fastest_first if (row["model"], row["arrivals"]) == (model, arrivals)],
        )
        for model, arrivals in kinds
    ]


_NO_RESULT = Result(System("", "varlen", "fp32", "iteration"), "", "", "at once", 0)


def _row(result: Result) -> dict[str, Cell]:
    figures: dict[str, Cell] = dict.fromkeys(_FIGURES)
    if result.rounds:
        spread = Spread.of(result.speeds)
        speeds = (spread.median, spread.p20, spread.p80)
        figures |= dict(zip(_FIGURES, speeds, strict=False))
        figures |= {name: result.median(name) for name in (*_TIMES, "machine_gflops")}
    return {
        "model": result.model,
        "workload": result.label,
        "arrivals": result.arrivals,
        "rate": result.rate,
        "system": result.system.name,
        "batch": result.size or None,
        "requests": result.requests,
        "tokens": result.tokens,
        "rounds": len(result.rounds),
        "equal_tokens": result.equal_tokens,
        **figures,
        "step_ms": None,
        "limit_ms": None,
        "calibration": result.calibration,
        "note": result.note,
    }


def _figures(results: Sequence[Result]) -> dict[str, Cell]:
    at_once = [result for result in results if result.arrivals == "at once"]
    poisson = [result for result in results if result.arrivals == "poisson"]
    ours, peer = _of(at_once, OURS), best_peer(at_once)
    # the first tokens of the best peer, whichever has them first
    firsts = [result.median("ttft_p99_ms") for result in poisson if not result.system.is_ours]
    first, soonest = _of(poisson, OURS), min((each for each in firsts if each), default=None)
    return {
        "vs_static_batch": _speed_ratio(ours, best_peer(at_once, static=True)),
        "vs_best_peer": _speed_ratio(ours, peer),
        "vs_request_level": _speed_ratio(ours, _of(at_once, REQUEST_LEVEL)),
        "ttft_p99_ratio": rounded(ratio(first.median("ttft_p99_ms") if first else None, soonest)),
        "best_peer": peer.system.name if peer else None,
        "tokens_per_second": rounded(ours.median("tokens_per_second") if ours else None, 1),
    }


def _of(results: Iterable[Result], name: str) -> Result | None:
    found = (result for result in results if result.system.name == name and result.rounds)
    return next(found, None)


def _speed_ratio(result: Result | None, base: Result | None) -> float | None:
    if result is None or base is None:
        return None
    return rounded(paired_ratio(result.speeds, base.speeds))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
