"""From results to the rows of the CSV, the tables on the screen and the BENCH line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.table import Table

from varlen_bench.harness.rows import Cell
from varlen_bench.kernels.beams import LIGHTSEQ
from varlen_bench.kernels.encoder import ENCODER
from varlen_bench.kernels.measure import COPY, OURS, Result
from varlen_bench.kernels.timing import Timing

# A shape is large if its bytes are at least as many: its kernel runs several times as long as it takes to start.
LARGE_BYTES = 32_000_000
# The beam step that is quoted: sequences, beams and vocabulary.
BEAM_SHAPE = "8x4x32000"

_MICROSECONDS = 1e6
Better = Callable[[Result], bool]


def bench_figures(results: Sequence[Result], gpu: str, copy: float) -> dict[str, Cell]:
    """Return the keys of the BENCH line; what was not measured is None.

    Args:
        results: of the whole run.
        gpu: its name.
        copy: GB/s of a copy on the device.
    """
    figures: dict[str, Cell] = {"gpu": gpu.replace(" ", "_")}
    names = {"softmax": "masked_softmax", "layernorm": "add_layer_norm"}
    for key, op in names.items():
        figures[f"{key}_frac"] = _rounded(least_fraction(results, op, copy))
    names |= {"attention": "attention_varlen", "encoder": ENCODER}
    for key, op in names.items():
        figures[f"{key}_vs_best"] = _rounded(min(ratios(results, op), default=None))
    quoted = [r for r in results if r.op == "beam_step" and r.system == OURS and r.graph]
    figures["beam_us"] = next(
        (_rounded(r.graph.median) for r in quoted if r.graph and r.shape == BEAM_SHAPE), None
    )
    against_torch = ratios(results, "beam_step", lambda r: r.system != LIGHTSEQ)
    figures["beam_vs_torch"] = _rounded(min(against_torch, default=None))
    return figures


def ratios(results: Sequence[Result], op: str, counts: Better = lambda r: True) -> list[float]:  # noqa: ARG005
    """Return for each shape the time of the fastest peer over ours, where both were measured.

    A peer counts with the shorter of its two times, ours with that in a graph.
    """
    found = []
    for ours in results:
        if ours.op != op or ours.system != OURS or ours.graph is None:
            continue
        best = best_peer(results, ours, counts)
        if best is not None and best.best is not None:
            found.append(best.best / ours.graph.median)
    return found


def best_peer(
    results: Sequence[Result],
    ours: Result,
    counts: Better = lambda r: True,  # noqa: ARG005
) -> Result | None:
    """Return the fastest peer at the op, shape and dtype of `ours`."""
    peers = [r for r in _same_case(results, ours) if r.is_peer and r.best is not None and counts(r)]
    return min(peers, key=lambda r: r.best or math.inf, default=None)


def least_fraction(results: Sequence[Result], op: str, copy: float) -> float | None:
    """Return the least part of the copy's bandwidth that ours reaches in a graph, over all large shapes."""
    large = [r for r in results if r.op == op and r.system == OURS and r.bytes_moved >= LARGE_BYTES]
    rates = [rate for r in large if (rate := _rate(r, r.graph)) is not None]
    return min(rates) / copy if rates and copy else None


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def csv_rows(
    results: Sequence[Result], *, gpu: str, driver: str, copy: float
) -> list[dict[str, Cell]]:
    """Return one row per result.

    Args:
        results: of the whole run: ratios need all of a case.
        gpu: its name.
        driver: its version.
        copy: GB/s of a copy on the device.
    """
    return [
        {
            "gpu": gpu,
            "driver": driver,
            "copy_gb_per_s": copy,
            "op": r.op,
            "shape": r.shape,
            "dtype": r.dtype,
            "system": r.system,
            "sets": r.sets or None,
            **_timing_cells("graph", r.graph),
            **_timing_cells("eager", r.eager),
            "bytes": r.bytes_moved or None,
            "gb_per_s": _rate(r, r.graph),
            "copy_fraction": _fraction(r, copy),
            "tflops": _per_second(r.flops, r.graph, 1e12),
            "tokens_per_second": _per_second(r.tokens, r.graph or r.eager, 1.0),
            "vs_best_peer": _ratio_of(results, r),
            "error": r.error,
            "note": r.note,
        }
        for r in results
    ]


def table(results: Sequence[Result], op: str, copy: float) -> Table:
    """Return one op's table: a line for each shape, a column for each peer; times in microseconds, graph | eager."""
    rows = [r for r in results if r.op == op]
    peers = list(dict.fromkeys(r.system for r in rows if r.is_peer))
    view = Table(title=_title(results, op), title_justify="left", box=box.SIMPLE_HEAD)
    view.add_column("shape")
    for heading in ("dtype", OURS, "GB/s", "TFLOP/s", "of copy", "of its copy", *peers, "x best"):
        view.add_column(heading, justify="right")
    for ours in (r for r in rows if r.system == OURS):
        same = {r.system: r for r in _same_case(rows, ours)}
        view.add_row(
            ours.shape,
            ours.dtype,
            _times(ours),
            _shown(_rate(ours, ours.graph), "{:,.0f}"),
            _shown(_per_second(ours.flops, ours.graph, 1e12), "{:.0f}"),
            _shown(_fraction(ours, copy), "{:.2f}"),
            _shown(_over(same.get(COPY), ours), "{:.2f}"),
            *(_times(same.get(peer)) for peer in peers),
            _shown(_ratio_of(results, ours), "{:.2f}"),
        )
    return view


def listing(results: Sequence[Result], op: str) -> Table:
    """Return an op's rows one below the other, with the rate of tokens where there is one."""
    view = Table(title=_title(results, op), title_justify="left", box=box.SIMPLE_HEAD)
    view.add_column("shape")
    view.add_column("dtype")
    view.add_column("what")
    for heading in ("us in a graph", "us by Python", "tokens/s"):
        view.add_column(heading, justify="right")
    view.add_column("note")
    for r in (r for r in results if r.op == op):
        graph, eager = (_shown(t.median if t else None, "{:,.1f}") for t in (r.graph, r.eager))
        tokens = _shown(_per_second(r.tokens, r.graph or r.eager, 1.0), "{:,.0f}")
        view.add_row(r.shape, r.dtype, r.system, graph, eager, tokens, r.note)
    return view


def _title(results: Sequence[Result], op: str) -> str:
    title = f"{op}: us in a graph | launched by Python"
    found = ratios(results, op)
    if found:
        title += f"; x best peer: {min(found):.2f} at worst, {geometric_mean(found):.2f} in the geometric mean"
    return title


def missing(results: Iterable[Result]) -> list[str]:
    """Return a line for each system that lacks a time, those of one reason in one line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for r in results:
        if r.note and (r.graph is None or r.eager is None) and not r.op.startswith("encoder-"):
            lines.setdefault((r.op, r.system, r.note), []).append(r.shape)
    return [
        f"{op}, {system}: {note} ({shapes[0]}"
        + (f" and {len(shapes) - 1} more)" if shapes[1:] else ")")
        for (op, system, note), shapes in lines.items()
    ]


def _same_case(results: Iterable[Result], ours: Result) -> list[Result]:
    return [r for r in results if (r.op, r.shape, r.dtype) == (ours.op, ours.shape, ours.dtype)]


def _ratio_of(results: Sequence[Result], r: Result) -> float | None:
    if r.system != OURS or r.graph is None:
        return None
    best = best_peer(results, r)
    return None if best is None or best.best is None else best.best / r.graph.median


def _rate(r: Result, timing: Timing | None) -> float | None:
    return _per_second(r.bytes_moved, timing, 1e9)


def _fraction(r: Result, copy: float) -> float | None:
    rate = _rate(r, r.graph)
    return rate / copy if rate is not None and copy else None


def _per_second(amount: int, timing: Timing | None, unit: float) -> float | None:
    if not amount or timing is None:
        return None
    return amount * _MICROSECONDS / timing.median / unit


def _over(a: Result | None, b: Result) -> float | None:
    if a is None or a.graph is None or b.graph is None:
        return None
    return a.graph.median / b.graph.median


def _timing_cells(name: str, timing: Timing | None) -> dict[str, Cell]:
    return {
        f"{name}_us": timing.median if timing else None,
        f"{name}_us_p20": timing.p20 if timing else None,
        f"{name}_us_p80": timing.p80 if timing else None,
        f"{name}_passes": timing.passes if timing else None,
    }


def _times(r: Result | None) -> str:
    if r is None:
        return ""
    return " | ".join(_shown(t.median if t else None, "{:,.1f}") for t in (r.graph, r.eager))


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
