"""One page that holds a whole run: figures, picture and every load, with nothing to fetch."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from varlen_bench import serving as bench_serving
from varlen_bench.harness.rows import Cell, Provenance
from varlen_bench.serving import report
from varlen_bench.serving.rows import Row

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff }
body { max-width: 84rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.loads { overflow-x: auto; font-size: 13px }
.loads td:nth-child(2), .loads td:nth-child(3) { text-align: left }
img { max-width: 100%; height: auto }
pre { white-space: pre-wrap; font-size: 13px; background: #f6f6f6; padding: 1rem }
"""
_RESULTS = (
    "system", "sustained/s", "saturated/s", "machine GFLOP/s", "light p50 ms", "light p99 ms", "batch", "padding",
    "prediction error", "RSS MiB", "cosine"
)  # fmt: skip


def render(
    rows: Sequence[Row],
    *,
    labels: Sequence[str],
    figures: Mapping[str, Cell],
    png: bytes | None,
    run: Provenance,
) -> str:
    """Return the page.

    Args:
        rows: of the run.
        labels: of its mixes of lengths.
        figures: of the BENCH line.
        png: the picture; None where nothing was searched.
        run: where, when and with what.
    """
    parts = [
        f"<h1>Serving under load</h1>\n<p>{escape(_told(run))}</p>",
        _table(["key", "value"], [[key, _number(value)] for key, value in figures.items()]),
    ]
    if png is not None:
        image = base64.b64encode(png).decode("ascii")
        parts.append(
            f'<p><img alt="served and latency by load" src="data:image/png;base64,{image}"></p>'
        )
    for label in labels:
        here = [row for row in rows if row.lengths == label]
        results = [row for row in here if row.kind == "result"]
        if results:
            cells = [[row.system, *report.result_cells(here, row)] for row in results]
            parts.append(f"<h2>{escape(label)} tokens</h2>\n{_table(_RESULTS, cells)}")
    parts += [*_paired(rows), *_overload(rows), *_checked(rows), *_notes(rows), _loads(rows)]
    parts.append(f"<h2>How it was measured</h2>\n<pre>{escape(bench_serving.__doc__ or '')}</pre>")
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Serving under load</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _paired(rows: Sequence[Row]) -> list[str]:
    summary = report.paired_summary(rows)
    if not summary:
        return []
    heading = list(report.PAIRED_HEADINGS)
    return [
        f"<h2>dp over token_budget, same arrivals: ratios of latency</h2>\n{_table(heading, summary)}"
    ]


def _overload(rows: Sequence[Row]) -> list[str]:
    lines = report.overload_lines(rows)
    return [f"<h2>Overload</h2>\n{_list(lines)}"] if lines else []


def _checked(rows: Sequence[Row]) -> list[str]:
    place = next((i for i, row in enumerate(rows) if row.kind == "perf_analyzer"), None)
    if place is None:
        return []
    heading = ["seen by", "offered/s", "served/s", "sent", "mean ms", "p50", "p99"]
    cells = [
        [
            seen,
            *(
                report.shown(getattr(row, name), form)
                for name, form in zip(
                    ("offered", "served", "sent", "mean_ms", "p50_ms", "p99_ms"),
                    (".1f", ".1f", ",", ".1f", ".1f", ".1f"),
                    strict=True,
                )
            ),
        ]
        for seen, row in (("this benchmark", rows[place - 1]), ("perf_analyzer", rows[place]))
    ]
    title = f"{rows[place].system}, {rows[place].lengths}: beside perf_analyzer"
    return [f"<h2>{escape(title)}</h2>\n{_table(heading, cells)}"]


def _notes(rows: Sequence[Row]) -> list[str]:
    found = report.notes(rows)
    return [f"<h2>What did not run</h2>\n{_list(found)}"] if found else []


def _loads(rows: Sequence[Row]) -> str:
    heading = [heading for heading, _, _ in report.LOAD_COLUMNS]
    cells = [report.load_cells(row) for row in rows if row.kind not in {"result", "failed"}]
    return f'<details><summary>every load</summary><div class="loads">{_table(heading, cells)}</div></details>'


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _number(value: Cell) -> str:
    if value is None:
        return "n/a"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _told(run: Provenance) -> str:
    return f"{run.date}, {run.revision}, {run.cpu}; {run.versions}; {run.command}"
