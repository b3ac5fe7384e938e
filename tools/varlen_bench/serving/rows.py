"""The rows of the CSV."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from varlen_bench.serving.figures import Point
from varlen_bench.serving.scrape import Counted

Kind: TypeAlias = Literal[
    "closed", "load", "most", "paired", "overload", "perf_analyzer", "result", "failed"
]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the CSV; the package's docstring says what the columns mean."""

    lengths: str
    system: str
    kind: Kind
    offered: float | None = None
    seconds: float | None = None
    warmup: int | None = None
    sent: int | None = None
    ok: int | None = None
    refused: int | None = None
    failed: int | None = None
    lost: int | None = None
    not_sent: int | None = None
    served: float | None = None
    share: float | None = None
    mean_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    lateness_p99_ms: float | None = None
    refused_p99_ms: float | None = None
    kept_deadline: float | None = None
    mean_batch: float | None = None
    padding_share: float | None = None
    prediction_error: float | None = None
    rss_mib: float | None = None
    rss_flatness: float | None = None
    machine_gflops: float | None = None
    cosine_min: float | None = None
    sustained: float | None = None
    saturated: float | None = None
    turn: int | None = None
    note: str = ""


def point_row(
    lengths: str,
    system: str,
    kind: Kind,
    point: Point,
    *,
    found: Counted,
    rss: int,
    speed: float,
    note: str = "",
) -> Row:
    """Return the row of one load.

    Args:
        lengths: the mix's label.
        system: its name.
        kind: of load.
        point: what was measured outside.
        found: what the system counted.
        speed: of the machine before the load, in GFLOP/s.
        rss: bytes that the process which serves the model has resident afterwards.
        note: anything more.
    """
    shared = {field.name: getattr(point, field.name) for field in fields(Point)}
    return Row(
        lengths,
        system,
        kind,
        **shared,
        mean_batch=found.mean_batch,
        padding_share=found.padding_share,
        prediction_error=found.prediction_error,
        rss_mib=rss / (1 << 20),
        machine_gflops=speed,
        note=note,
    )
