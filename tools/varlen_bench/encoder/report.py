"""From seconds per round to the figures of a row, the BENCH keys and the table on the screen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from rich.table import Table

from varlen_bench.encoder.systems import BASELINE, System
from varlen_bench.harness.rows import Cell

EQUAL_QUALITY = 0.999
WORKLOAD_PREFIX = {"uniform": "", "short": "short_"}


@dataclass(slots=True)
class Result:
    """What one system did on one workload. `speeds` holds tokens/s, one per round."""

    system: System
    workload: str
    sequences: int = 0
    tokens: int = 0
    batching: str = ""
    calibration: dict[str, float] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)
    cosines: npt.NDArray[np.float32] | None = None
    peak_rss_mib: float = 0.0
    note: str = ""
    failed: bool = False

    @property
    def speed(self) -> float:
        """Real tokens per second, the median over rounds."""
        return statistics.median(self.speeds)

    @property
    def is_comparable(self) -> bool:
        """Whether it ran and its vectors are as good as the reference's."""
        return not self.failed and self.cosines is not None and self.mean_cosine >= EQUAL_QUALITY

    @property
    def mean_cosine(self) -> float:
        """The mean cosine of its vectors to the reference's."""
        assert self.cosines is not None
        return float(self.cosines.mean())


def cosines(
    vectors: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return the cosine of each row of `vectors` with its row of `reference`, [rows].

    Raises:
        ValueError: the shapes disagree, or a row is not finite.
    """
    if vectors.shape != reference.shape:
        raise ValueError(f"vectors have shape {vectors.shape}; the reference {reference.shape}")
    if not np.isfinite(vectors).all():
        raise ValueError("vectors hold values that are not finite")
    left, right = vectors.astype(np.float64), reference.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray((left * right).sum(axis=1) / norms, dtype=np.float32)


def paired_ratio(speeds: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of speed over base speed in the same round."""
    return statistics.median(a / b for a, b in zip(speeds, base, strict=True))


def fastest(results: Sequence[Result]) -> Result | None:
    """Return the result of greatest median speed among those of equal quality."""
    return max((r for r in results if r.is_comparable), key=lambda r: r.speed, default=None)


def bench_figures(results: Sequence[Result]) -> dict[str, Cell]:
    """Return the keys of the BENCH line; a comparison whose system did not run is None."""
    figures: dict[str, Cell] = {}
    for workload, prefix in WORKLOAD_PREFIX.items():
        rows = [r for r in results if r.workload == workload]
        ours = fastest([r for r in rows if r.system.is_ours])
        peer = fastest([r for r in rows if not r.system.is_ours])
        transformers = fastest([r for r in rows if r.system.engine == "transformers"])
        baseline = _baseline(rows)
        figures |= {
            f"{prefix}vs_transformers_fifo_fp32": _ratio(ours, baseline),
            f"{prefix}vs_best_peer": _ratio(ours, peer),
            f"{prefix}best_peer": peer.system.name if peer else None,
            f"{prefix}cosine": round(ours.mean_cosine, 6) if ours else None,
            f"{prefix}ours": ours.system.name if ours else None,
            f"{prefix}vs_transformers_best": _ratio(ours, transformers),
            f"{prefix}tokens_per_second": round(ours.speed) if ours else None,
        }
    return figures


def csv_rows(results: Sequence[Result], model: str) -> list[dict[str, Cell]]:
    """Return one row per system and workload, failed ones too."""
    rows: list[dict[str, Cell]] = []
    for r in results:
        ran = not r.failed
        baseline = _baseline([b for b in results if b.workload == r.workload])
        rows.append(
            {
                "model": model,
                "workload": r.workload,
                "system": r.system.name,
                "batch": r.batching or None,
                "sequences": r.sequences,
                "tokens": r.tokens,
                "rounds": len(r.speeds),
                "tokens_per_second": round(r.speed) if ran else None,
                "tokens_per_second_p20": round(np.percentile(r.speeds, 20)) if ran else None,
                "tokens_per_second_p80": round(np.percentile(r.speeds, 80)) if ran else None,
                "sequences_per_second": r.speed * r.sequences / r.tokens if ran else None,
                "ratio_to_fifo": _ratio(r, baseline),
                "cosine_mean": r.mean_cosine if ran else None,
                "cosine_min": float(r.cosines.min()) if ran and r.cosines is not None else None,
                "peak_rss_mib": round(r.peak_rss_mib) if ran else None,
                "calibration": "; ".join(f"{k}: {v:.0f}" for k, v in r.calibration.items()),
                "note": r.note,
            }
        )
    return rows


def table(results: Sequence[Result], workload: str) -> Table:
    """Return the table of one workload, fastest first, systems that did not run last."""
    rows = [r for r in results if r.workload == workload]
    baseline = _baseline(rows)
    largest = max(rows, key=lambda r: r.sequences, default=None)
    of = f": {largest.sequences} sequences, {largest.tokens} tokens" if largest else ""
    view = Table(title=f"{workload}{of}", title_justify="left")
    view.add_column("system")
    view.add_column("batch")
    headings = ("tokens/s", "p20-p80", "sequences/s", "x fifo", "cosine mean", "min", "MiB")
    for heading in headings:
        view.add_column(heading, justify="right")
    view.add_column("note")
    for r in sorted(rows, key=lambda r: (r.failed, -r.speed if not r.failed else 0.0)):
        if r.failed or r.cosines is None:
            view.add_row(r.system.name, *["-"] * (len(headings) + 1), r.note)
            continue
        low, high = np.percentile(r.speeds, [20, 80])
        ratio = _ratio(r, baseline)
        view.add_row(
            r.system.name,
            r.batching,
            f"{r.speed:,.0f}",
            f"{low:,.0f}-{high:,.0f}",
            f"{r.speed * r.sequences / r.tokens:,.1f}",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{r.mean_cosine:.6f}",
            f"{r.cosines.min():.6f}",
            f"{r.peak_rss_mib:,.0f}",
            r.note,
            style="bold" if r.system.is_ours else "" if r.is_comparable else "dim",
        )
    return view


def _baseline(rows: Sequence[Result]) -> Result | None:
    return next((r for r in rows if r.system.name == BASELINE and not r.failed), None)


def _ratio(result: Result | None, base: Result | None) -> float | None:
    if result is None or base is None or result.failed or base.failed:
        return None
    return round(paired_ratio(result.speeds, base.speeds), 4)
