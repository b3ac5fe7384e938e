"""CSV rows, tables and the BENCH line of the kernel benchmark."""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from varlen_bench.harness.rows import Cell, csv_table
from varlen_bench.harness.summary import Spread, ratio, rounded, shown, worst
from varlen_bench.kernels.encoder import ENCODER
from varlen_bench.kernels.measure import COPY, OURS, Result
from varlen_bench.kernels.op_peers import LIGHTSEQ
from varlen_tools.tables import Table

# Shapes from this size on run several times as long as a kernel launch takes.
LARGE_BYTES = 32_000_000
# Beam step in the BENCH line: sequences, beams, vocabulary.
BEAM_SHAPE = "8x4x32000"
_LISTED_COLUMNS = "shape dtype system graph_us eager_us tokens_per_second note".split()


def bench_figures(results: Sequence[Result], copy: float) -> dict[str, Cell]:
    """Return the figures of the BENCH line; None if not measured."""
    figures: dict[str, Cell] = {}
    ops = {"softmax": "masked_softmax", "layernorm": "add_layer_norm"}
    for key, op in ops.items():
        figures[f"{key}_frac"] = rounded(lowest_fraction(results, op, copy), 3)
    ops |= {"attention": "attention_varlen", "encoder": ENCODER}
    for key, op in ops.items():
        figures[f"{key}_vs_best"] = rounded(min(ratios(results, op), default=None), 3)
    quoted = [r for r in results if (r.op, r.shape, r.system) == ("beam_step", BEAM_SHAPE, OURS)]
    figures["beam_us"] = next((rounded(r.graph.median, 3) for r in quoted if r.graph), None)
    against_torch = ratios(results, "beam_step", without=LIGHTSEQ)
    figures["beam_vs_torch"] = rounded(min(against_torch, default=None), 3)
    return figures


def ratios(results: Sequence[Result], op: str, *, without: str = "") -> list[float]:
    """Return the time of the fastest peer over ours, for each shape with both times.

    Args:
        without: a peer to ignore.
    """
    found = [_vs_best_peer(results, r, without) for r in results if r.op == op]
    return [value for value in found if value is not None]


def lowest_fraction(results: Sequence[Result], op: str, copy: float) -> float | None:
    """Return our lowest fraction of the copy's bandwidth over all large shapes."""
    large = [r for r in results if r.op == op and r.system == OURS and r.bytes_moved >= LARGE_BYTES]
    fractions = [ratio(_gb_per_s(r), copy) for r in large]
    return worst(min, fractions)


def csv_rows(results: Sequence[Result], copy: float) -> list[dict[str, Cell]]:
    """Return one row per result; `copy` is the bandwidth of a copy in GB/s."""
    return [
        {
            "copy_gb_per_s": copy,
            "op": r.op,
            "shape": r.shape,
            "dtype": r.dtype,
            "system": r.system,
            "sets": r.sets or None,
            **_spread_cells("graph", r.graph),
            **_spread_cells("eager", r.eager),
            "bytes": r.bytes_moved or None,
            "gb_per_s": _gb_per_s(r),
            "copy_fraction": ratio(_gb_per_s(r), copy),
            "tflops": _per_second(r.flops, r.graph, 1e12),
            "tokens_per_second": _per_second(r.tokens, r.graph or r.eager, 1.0),
            "vs_best_peer": _vs_best_peer(results, r),
            "error": r.error,
            "note": r.note,
        }
        for r in results
    ]


def table(results: Sequence[Result], op: str, copy: float) -> Table:
    """Return the table of an op: one line per shape, one column per peer."""
    rows = [r for r in results if r.op == op]
    peers = list(dict.fromkeys(r.system for r in rows if r.is_peer))
    figures = (OURS, "GB/s", "TFLOP/s", "of copy", "of its copy", *peers, "x best")
    lines = []
    for ours in (r for r in rows if r.system == OURS):
        same = {r.system: r for r in _results_of_call(rows, ours)}
        times = [r.graph.median if r and r.graph else None for r in (same.get(COPY), ours)]
        cells = [
            ours.shape,
            ours.dtype,
            _times(ours),
            shown(_gb_per_s(ours), ",.0f"),
            shown(_per_second(ours.flops, ours.graph, 1e12), ".0f"),
            shown(ratio(_gb_per_s(ours), copy), ".2f"),
            shown(ratio(*times), ".2f"),
            *(_times(same.get(peer)) for peer in peers),
            shown(_vs_best_peer(results, ours), ".2f"),
        ]
        lines.append(cells)
    return Table(_title(results, op), ("shape", "dtype", *figures), lines, align_right=True)


def listing(results: Sequence[Result], op: str) -> Table:
    """Return the table of an op with one line per result."""
    rows = csv_rows([r for r in results if r.op == op], copy=0.0)
    return csv_table(_title(results, op), _LISTED_COLUMNS, rows)


def missing_times(results: Iterable[Result]) -> list[str]:
    """Return a line per system and reason for the times that are missing."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for r in results:
        if r.note and (r.graph is None or r.eager is None) and not r.op.startswith("encoder-"):
            lines.setdefault((r.op, r.system, r.note), []).append(r.shape)
    return [
        f"{op}, {system}: {note} ({shapes[0]}"
        + (f" and {len(shapes) - 1} more)" if shapes[1:] else ")")
        for (op, system, note), shapes in lines.items()
    ]


def _title(results: Sequence[Result], op: str) -> str:
    title = f"{op}: us in a graph | launched by Python"
    if found := ratios(results, op):
        mean = geometric_mean(found)
        title += f"; x best peer: {min(found):.2f} at worst, {mean:.2f} in the geometric mean"
    return title


def _results_of_call(results: Iterable[Result], ours: Result) -> list[Result]:
    return [r for r in results if (r.op, r.shape, r.dtype) == (ours.op, ours.shape, ours.dtype)]


def _vs_best_peer(results: Sequence[Result], r: Result, without: str = "") -> float | None:
    """Return the shortest time of all peers over ours in a graph."""
    if r.system != OURS or r.graph is None:
        return None
    peers = [
        p.best for p in _results_of_call(results, r) if p.is_peer and p.best and p.system != without
    ]
    return ratio(min(peers, default=None), r.graph.median)


def _gb_per_s(r: Result) -> float | None:
    """Return the bandwidth in a graph, in GB/s."""
    return _per_second(r.bytes_moved, r.graph, 1e9)


def _per_second(amount: int, time: Spread | None, unit: float) -> float | None:
    return amount * 1e6 / time.median / unit if amount and time else None


def _spread_cells(name: str, time: Spread | None) -> dict[str, Cell]:
    columns = ("us", "us_p20", "us_p80", "passes")
    figures = (time.median, time.p20, time.p80, time.count) if time else (None,) * 4
    return {f"{name}_{column}": figure for column, figure in zip(columns, figures, strict=True)}


def _times(r: Result | None) -> str:
    if r is None:
        return ""
    return " | ".join(shown(t.median if t else None, ",.1f") for t in (r.graph, r.eager))
