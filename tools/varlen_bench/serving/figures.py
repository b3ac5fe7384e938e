"""The figures of the BENCH lines."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import ratio, rounded, worst
from varlen_bench.serving.rows import Row
from varlen_bench.serving.systems import (
    BEFORE,
    DYNAMIC_BATCHER,
    FIFO_PADDED,
    OURS,
    OURS_FP32,
    OURS_INT8,
    OURS_PADDED,
    SYSTEMS,
    TOKEN_BUDGET,
)
from varlen_tools.workloads import Mix


def bench_figures(rows: Sequence[Row], mixes: Sequence[Mix]) -> dict[str, Cell]:
    """Return the keys of the BENCH line; a mix other than `uniform` is a prefix."""
    figures: dict[str, Cell] = {}
    for mix in sorted(mixes, key=lambda mix: mix.name != "uniform"):
        prefix = "" if mix.name == "uniform" else f"{mix.name}_"
        of_mix = _mix_figures([row for row in rows if row.lengths == mix.label])
        figures |= {f"{prefix}{key}": value for key, value in of_mix.items()}
        # once, after the first mix
        figures["lost"] = sum(row.lost or 0 for row in rows)
    return figures


def overload_figures(rows: Sequence[Row]) -> dict[str, Cell]:
    """Return the keys of the BENCH line of an overload: the worst of each figure."""
    loads = [row for row in rows if row.kind == "overload"]
    return {
        "refused_p99_ms": rounded(worst(max, (row.refused_p99_ms for row in loads))),
        "kept_deadline": rounded(worst(min, (row.kept_deadline or 0.0 for row in loads))),
        "rss_flatness": rounded(worst(max, (row.rss_flatness for row in loads))),
        "failed": sum(row.failed or 0 for row in rows),
        "lost": sum(row.lost or 0 for row in rows),
    }


def lone_figures(rows: Sequence[Row], mixes: Sequence[Mix]) -> dict[str, Cell]:
    """Return the keys of `--lone`: our time over the fastest peer's."""
    figures: dict[str, Cell] = {}
    for mix in mixes:
        times = lone_times([row for row in rows if row.lengths == mix.label])
        for ours, precision in ((OURS_FP32, "fp32"), (OURS_INT8, "int8")):
            peers = (SYSTEMS[name] for name in times if not SYSTEMS[name].is_ours)
            fastest = min(
                (times[each.name] for each in peers if each.precision == precision), default=None
            )
            key = f"{mix.name}_{precision}_vs_{precision}_peer"
            figures[key] = rounded(ratio(times.get(ours), fastest))
    figures["lost"] = sum(row.lost or 0 for row in rows)
    return figures


def lone_times(rows: Iterable[Row]) -> dict[str, float]:
    """Return the latency of each system in ms, among the rows of one length."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if row.kind == "lone" and row.p50_ms is not None:
            times.setdefault(row.system, []).append(row.p50_ms)
    return {system: statistics.median(each) for system, each in times.items()}


def best_peer(rows: Iterable[Row], precision: str = "") -> Row | None:
    """Return the result of the peer that sustains most, among the rows of one mix.

    Args:
        rows: rows of the mix.
        precision: precision of the peers that count; all if empty.
    """
    results = [(row, SYSTEMS[row.system]) for row in rows if row.kind == "result"]
    peers = [
        row for row, system in results if not system.is_ours and precision in {"", system.precision}
    ]
    return max(peers, key=lambda row: row.sustained or 0.0, default=None)


def paired_ratios(rows: Iterable[Row], attribute: str, other: str = TOKEN_BUDGET) -> list[float]:
    """Return `varlen-dp` over another system of the paired loads, by load and turn."""
    loads: dict[tuple[float | None, int | None], dict[str, float]] = {}
    for row in rows:
        value = getattr(row, attribute)
        if row.kind == "paired" and value is not None:
            loads.setdefault((row.offered, row.turn), {})[row.system] = value
    return [
        values[OURS] / values[other] for values in loads.values() if {OURS, other} <= values.keys()
    ]


def _mix_figures(rows: Sequence[Row]) -> dict[str, Cell]:
    results = {row.system: row for row in rows if row.kind == "result"}

    def over(whole: Row | None, attribute: str, part: str = OURS) -> float | None:
        values = (getattr(row, attribute, None) for row in (results.get(part), whole))
        return rounded(ratio(*values))

    def mean_ratio(attribute: str, other: str) -> float | None:
        ratios = paired_ratios(rows, attribute, other)
        return rounded(statistics.geometric_mean(ratios)) if ratios else None

    dynamic_batcher, fifo = results.get(DYNAMIC_BATCHER), results.get(FIFO_PADDED)
    if any(row.system == BEFORE for row in rows):
        return {
            "mean_vs_before": mean_ratio("mean_ms", BEFORE),
            "p99_vs_before": mean_ratio("p99_ms", BEFORE),
        }
    return {
        "sustained_vs_dynamic_batcher": over(dynamic_batcher, "sustained"),
        "sustained_vs_best_peer": over(best_peer(rows), "sustained"),
        "fp32_vs_dynamic_batcher": over(dynamic_batcher, "sustained", OURS_FP32),
        "fp32_vs_best_fp32_peer": over(best_peer(rows, "fp32"), "sustained", OURS_FP32),
        "int8_vs_best_fp32_peer": over(best_peer(rows, "fp32"), "sustained", OURS_INT8),
        "int8_vs_best_int8_peer": over(best_peer(rows, "int8"), "sustained", OURS_INT8),
        "dp_padded_vs_fifo_padded": over(fifo, "saturated", OURS_PADDED),
        "dp_mean_vs_token_budget": mean_ratio("mean_ms", TOKEN_BUDGET),
        "dp_p99_vs_token_budget": mean_ratio("p99_ms", TOKEN_BUDGET),
    }
