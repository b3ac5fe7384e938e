"""CSV rows, keys of the BENCH line, and tables, from the tokens/s of each round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from varlen_bench.compare import results as compare
from varlen_bench.compare.results import Result, csv_row, fastest, result_of, speed_ratio
from varlen_bench.encoder.systems import BASELINE
from varlen_bench.encoder.workload import GRID_BATCHES
from varlen_bench.harness.accuracy import EQUAL_QUALITY
from varlen_bench.harness.rows import Cell
from varlen_tools.tables import Table

_KEY_PREFIXES = {"uniform": "", "short": "short_"}
_SPEEDS = ("tokens_per_second", "tokens_per_second_p20", "tokens_per_second_p80")
_FIGURES = (
    *_SPEEDS,
    *"sequences_per_second ratio_to_fifo cosine_mean cosine_min peak_rss_mib".split(),
)
_COLUMNS = (
    *"model workload system batch sequences tokens rounds".split(),
    *_FIGURES,
    *("calibration", "note"),
)


@dataclass(slots=True, kw_only=True)
class EncoderResult(Result):
    """A result with the cosines of its vectors to the vectors of the reference."""

    cosine_mean: float = 0.0
    cosine_min: float = 0.0


def csv_rows(results: Sequence[EncoderResult], model: str) -> list[dict[str, Cell]]:
    """Return a row for each system and workload, also for those that failed."""
    return [
        csv_row(result, _COLUMNS, model=model, **_derived(result, results)) for result in results
    ]


def bench_figures(results: Sequence[EncoderResult]) -> dict[str, Cell]:
    """Return the keys of the BENCH line; None where a system did not run."""
    figures: dict[str, Cell] = {}
    for workload, prefix in _KEY_PREFIXES.items():
        here = [result for result in results if result.workload == workload]
        ours = _fastest(result for result in here if result.system.is_ours)
        peer = _fastest(result for result in here if not result.system.is_ours)
        transformers = _fastest(r for r in here if r.system.engine == "transformers")
        figures |= {
            f"{prefix}vs_transformers_fifo_fp32": speed_ratio(ours, result_of(here, BASELINE)),
            f"{prefix}vs_best_peer": speed_ratio(ours, peer),
            f"{prefix}best_peer": peer.system.name if peer else None,
            f"{prefix}cosine": round(ours.cosine_mean, 6) if ours else None,
            f"{prefix}ours": ours.system.name if ours else None,
            f"{prefix}vs_transformers_best": speed_ratio(ours, transformers),
            f"{prefix}tokens_per_second": round(_speed(ours)) if ours else None,
            **_by_precision(here, prefix),
        }
    return figures


def grid_figures(results: Sequence[EncoderResult]) -> dict[str, Cell]:
    """Return the keys of batches of equal sequences: geometric means over their lengths.

    Ours in fp32 over transformers, and over the fastest peer in fp32 at each length.
    """
    engines = {"vs_transformers": "transformers", "vs_best_peer": ""}
    return {
        f"batch_{size}_{key}": _grid_ratio(results, size, engine)
        for size in GRID_BATCHES
        for key, engine in engines.items()
    }


def _grid_ratio(results: Sequence[EncoderResult], size: int, engine: str) -> float | None:
    """Return ours over the fastest peer, or the fastest of one engine, at a size."""
    fp32 = [result for result in results if result.system.precision == "fp32"]
    ratios = []
    for workload in dict.fromkeys(result.workload for result in fp32):
        if not workload.startswith(f"{size}x"):
            continue
        here = [result for result in fp32 if result.workload == workload]
        ours = fastest(result for result in here if result.system.is_ours)
        peers = (result for result in here if not result.system.is_ours)
        peer = fastest(each for each in peers if engine in {"", each.system.engine})
        ratios.append(speed_ratio(ours, peer))
    found = [ratio for ratio in ratios if ratio is not None]
    return round(statistics.geometric_mean(found), 4) if found else None


def _by_precision(results: Sequence[EncoderResult], prefix: str) -> dict[str, Cell]:
    """Return ours over the fastest peer of one precision, whatever its quality, and both cosines."""
    figures: dict[str, Cell] = {}
    for precision in ("fp32", "int8"):
        ran = [each for each in results if each.system.precision == precision and each.rounds]
        ours = next((result for result in ran if result.system.is_ours), None)
        peer = fastest(result for result in ran if not result.system.is_ours)
        figures[f"{prefix}{precision}_vs_{precision}_peer"] = speed_ratio(ours, peer)
    figures[f"{prefix}int8_cosine"] = round(ours.cosine_mean, 6) if ours else None
    figures[f"{prefix}int8_peer_cosine"] = round(peer.cosine_mean, 6) if peer else None
    return figures


def tables(rows: Sequence[Mapping[str, Cell]]) -> list[Table]:
    """Return a table of each workload, the fastest system first."""
    columns = ("system", "batch", "sequences", *_FIGURES, "note")
    return compare.tables(rows, columns, by=["workload"], speed="tokens_per_second")


def _derived(result: EncoderResult, results: Iterable[EncoderResult]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {"sequences": result.requests, "tokens": result.work}
    if not result.rounds:
        return {**cells, "cosine_mean": None, "cosine_min": None}
    figures = result.figures()
    here = (other for other in results if other.workload == result.workload)
    return {
        **cells,
        **{name: round(float(figures[name] or 0)) for name in _SPEEDS},
        "sequences_per_second": _speed(result) * result.requests / result.work,
        "ratio_to_fifo": speed_ratio(result, result_of(here, BASELINE)),
        "peak_rss_mib": round(max(each["peak_rss_mib"] for each in result.rounds)),
    }


def _fastest(results: Iterable[EncoderResult]) -> EncoderResult | None:
    """Return the fastest result of equal quality; a mean of NaN is none."""
    return fastest(result for result in results if result.cosine_mean >= EQUAL_QUALITY)


def _speed(result: EncoderResult) -> float:
    return statistics.median(result.speeds)
