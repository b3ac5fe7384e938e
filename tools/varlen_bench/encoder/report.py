"""CSV rows, keys of the BENCH line, and tables, from the tokens/s of each round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from varlen_bench.encoder.systems import BASELINE, System
from varlen_bench.harness.accuracy import EQUAL_QUALITY
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import Spread, paired_ratio, rounded
from varlen_bench.harness.tables import Table

_KEY_PREFIXES = {"uniform": "", "short": "short_"}
_FIGURES = (
    "tokens_per_second tokens_per_second_p20 tokens_per_second_p80 sequences_per_second ratio_to_fifo "
    "cosine_mean cosine_min peak_rss_mib"
).split()


@dataclass(slots=True)
class Result:
    """Measurements of one system on one workload; one that failed has no speeds."""

    system: System
    workload: str
    sequences: int
    tokens: int
    batching: str = ""
    calibration: dict[str, float] = field(default_factory=dict)
    # tokens/s, one per round
    speeds: list[float] = field(default_factory=list)
    cosine_mean: float = 0.0
    cosine_min: float = 0.0
    peak_rss_mib: float = 0.0
    note: str = ""

    @property
    def speed(self) -> float:
        """Tokens/s, the median over rounds."""
        return statistics.median(self.speeds)


def csv_rows(results: Sequence[Result], model: str) -> list[dict[str, Cell]]:
    """Return a row for each system and workload, also for those that failed."""
    return [
        {
            "model": model,
            "workload": result.workload,
            "system": result.system.name,
            "batch": result.batching or None,
            "sequences": result.sequences,
            "tokens": result.tokens,
            "rounds": len(result.speeds),
            **_figures(result, _baseline(results, result.workload)),
            "calibration": "; ".join(f"{k}: {v:.0f}" for k, v in result.calibration.items()),
            "note": result.note,
        }
        for result in results
    ]


def bench_figures(results: Sequence[Result]) -> dict[str, Cell]:
    """Return the keys of the BENCH line; None where a system did not run."""
    figures: dict[str, Cell] = {}
    for workload, prefix in _KEY_PREFIXES.items():
        here = [result for result in results if result.workload == workload]
        ours = _fastest(result for result in here if result.system.engine == "varlen")
        peer = _fastest(result for result in here if result.system.engine != "varlen")
        transformers = _fastest(r for r in here if r.system.engine == "transformers")
        figures |= {
            f"{prefix}vs_transformers_fifo_fp32": _ratio(ours, _baseline(here, workload)),
            f"{prefix}vs_best_peer": _ratio(ours, peer),
            f"{prefix}best_peer": peer.system.name if peer else None,
            f"{prefix}cosine": round(ours.cosine_mean, 6) if ours else None,
            f"{prefix}ours": ours.system.name if ours else None,
            f"{prefix}vs_transformers_best": _ratio(ours, transformers),
            f"{prefix}tokens_per_second": round(ours.speed) if ours else None,
            **_by_precision(here, prefix),
        }
    return figures


def _by_precision(results: Sequence[Result], prefix: str) -> dict[str, Cell]:
    """Return ours over the fastest peer of one precision, whatever its quality, and both cosines."""
    figures: dict[str, Cell] = {}
    for precision in ("fp32", "int8"):
        ran = [r for r in results if r.system.precision == precision and r.speeds]
        ours = next((r for r in ran if r.system.engine == "varlen"), None)
        peers = (r for r in ran if r.system.engine != "varlen")
        peer = max(peers, key=lambda r: r.speed, default=None)
        figures[f"{prefix}{precision}_vs_{precision}_peer"] = _ratio(ours, peer)
    figures[f"{prefix}int8_cosine"] = round(ours.cosine_mean, 6) if ours else None
    figures[f"{prefix}int8_peer_cosine"] = round(peer.cosine_mean, 6) if peer else None
    return figures


def tables(rows: Sequence[Mapping[str, Cell]]) -> list[Table]:
    """Return a table of each workload, the fastest system first."""
    columns = ("system", "batch", "sequences", *_FIGURES, "note")
    fastest_first = sorted(rows, key=lambda row: -float(row["tokens_per_second"] or 0))
    return [
        Table.of(name, columns, (row for row in fastest_first if row["workload"] == name))
        for name in _KEY_PREFIXES
    ]


def _figures(result: Result, baseline: Result | None) -> dict[str, Cell]:
    if not result.speeds:
        return dict.fromkeys(_FIGURES)
    spread = Spread.of(result.speeds)
    figures = (
        round(spread.median),
        round(spread.p20),
        round(spread.p80),
        spread.median * result.sequences / result.tokens,
        _ratio(result, baseline),
        result.cosine_mean,
        result.cosine_min,
        round(result.peak_rss_mib),
    )
    return dict(zip(_FIGURES, figures, strict=True))


def _fastest(results: Iterable[Result]) -> Result | None:
    """Return the fastest result of equal quality; a mean of NaN is none."""
    equal = (r for r in results if r.speeds and r.cosine_mean >= EQUAL_QUALITY)
    return max(equal, key=lambda r: r.speed, default=None)


def _baseline(results: Iterable[Result], workload: str) -> Result | None:
    found = (r for r in results if (r.workload, r.system.name) == (workload, BASELINE))
    return next((result for result in found if result.speeds), None)


def _ratio(result: Result | None, base: Result | None) -> float | None:
    if result is None or base is None:
        return None
    return rounded(paired_ratio(result.speeds, base.speeds))
