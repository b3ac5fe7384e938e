"""The page of the board: tables and a picture, made from its CSV.

The last row of a checkpoint and an engine counts, and no row of a checkpoint that has changed since.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from varlen_bench.fidelity.corpus import KINDS
from varlen_bench.fidelity.judge import Verdict
from varlen_bench.fidelity.reasons import REASONS

# A kind of input of a checkpoint: columns of the CSV, `inputs`, `result` and `remark`.
Row: TypeAlias = Mapping[str, str]
_RESULTS = ("equal", "different", "refused")
_COLORS = {"equal": "#2f8f5b", "different": "#c8402f", "refused": "#8a919c"}
_BEGIN, _END = "<!-- board -->", "<!-- end of board -->"
# Where every checkpoint has a line, at the end of the page.
_BEGIN_ALL, _END_ALL = "<!-- checkpoints -->", "<!-- end of checkpoints -->"
# Remarks that a table of an engine names.
_MOST_REMARKS = 6
_BAR, _LEFT, _LINE = 300, 110, 34


def read_board(path: Path, current: Mapping[str, str]) -> list[Row]:
    """Return the rows that count, those without an original's answer left out.

    Args:
        current: digest of each checkpoint.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = [
            row for row in csv.DictReader(file) if current.get(row["checkpoint"]) == row["corpus"]
        ]
    last = {(line["engine"], line["checkpoint"]): line for line in lines}
    rows = []
    for line in last.values():
        for kind in KINDS:
            if line[kind]:
                verdict = Verdict.read(line[kind])
                rows.append(
                    {**line, "inputs": kind, "result": verdict.result, "remark": verdict.remark}
                )
    return [row for row in rows if row["result"] in _RESULTS]


def write_page(page: Path, rows: Sequence[Row]) -> None:
    """Write the tables between the marks of a page, and the picture beside it.

    Raises:
        ValueError: the page has no marks.
    """
    text = page.read_text(encoding="utf-8")
    picture = page.with_suffix(".svg")
    parts = [f"![Answers of each engine]({picture.name})", *tables_of(rows)]
    text = _between(text, page.name, _BEGIN, _END, "\n\n".join(parts))
    text = _between(text, page.name, _BEGIN_ALL, _END_ALL, checkpoints_of(rows))
    picture.write_text(picture_of(rows), encoding="utf-8")
    page.write_text(text, encoding="utf-8")


def _between(text: str, name: str, begin: str, end: str, made: str) -> str:
    if begin not in text or end not in text:
        raise ValueError(f"{name} has no lines {begin} and {end}")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    return f"{before}{begin}\n\n{made}\n\n{after}"


def tables_of(rows: Sequence[Row]) -> list[str]:
    """Return the tables in Markdown: engines, kinds of input, tasks, and reasons."""
    engines = _engines(rows)
    versions = {row["engine"]: row["engine_version"] for row in rows}
    total = []
    for engine in engines:
        own = [row for row in rows if row["engine"] == engine]
        checkpoints = len({row["checkpoint"] for row in own})
        total.append([engine, versions[engine], str(checkpoints), *_counts(own)])
    parts = [_table(["engine", "version", "checkpoints", *_RESULTS], total)]
    for column, title in (("inputs", "kind of input"), ("task", "task")):
        lines = []
        for value in sorted({row[column] for row in rows}):
            cells = [
                "/".join(
                    _counts(row for row in rows if row[column] == value and row["engine"] == engine)
                )
                for engine in engines
            ]
            lines.append([value, *cells])
        parts.append(_table([title, *engines], lines))
    parts.append(_reasons(rows, engines))
    parts.append(_table(["engine", "checkpoints", "refused with"], _refusals(rows)))
    return parts


def checkpoints_of(rows: Sequence[Row]) -> str:
    """Return the table of all checkpoints: inputs that differ or are refused."""
    engines = _engines(rows)
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    tasks = {row["checkpoint"]: row["task"] for row in rows}
    for row in rows:
        found[row["checkpoint"], row["engine"]][row["result"]].append(row["inputs"])
    return _table(
        ["checkpoint", "task", *engines],
        [
            [name, task, *(_summary(found[name, engine]) for engine in engines)]
            for name, task in sorted(tasks.items(), key=lambda each: each[0].lower())
        ],
    )


def _summary(results: Mapping[str, Sequence[str]]) -> str:
    """Return a cell: `equal`, `refused`, or the kinds of input that differ."""
    if not results:
        return ""
    if len(results) == 1:
        (only,) = results
        return f"**{only}**" if only == "different" else only
    parts = []
    if results.get("different"):
        parts.append(f"**different**: {', '.join(results['different'])}")
    if results.get("refused"):
        parts.append(f"refused: {', '.join(results['refused'])}")
    return "; ".join(parts)


def picture_of(rows: Sequence[Row]) -> str:
    """Return an SVG with one bar for each engine: equal, different, refused."""
    engines = _engines(rows)
    height = _LINE * len(engines) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _BAR + 20} {height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{_LEFT + _BAR + 20}" height="{height}" fill="white"/>',
    ]
    for index, engine in enumerate(engines):
        counts = Counter(row["result"] for row in rows if row["engine"] == engine)
        number, x, y = sum(counts.values()), float(_LEFT), 10 + index * _LINE
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(engine)}</text>'
        )
        for result in _RESULTS:
            width = _BAR * counts[result] / number
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{_COLORS[result]}"/>'
            )
            if width > 30:
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" fill="white">'
                    f"{counts[result]}</text>"
                )
            x += width
    words, places = ("equal", "silently different", "refused"), (_LEFT, _LEFT + 80, _LEFT + 230)
    for result, word, x in zip(_RESULTS, words, places, strict=True):
        y = height - 28
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLORS[result]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{word}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _engines(rows: Iterable[Row]) -> list[str]:
    """Return the engines, those with most equal answers first."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row["engine"]] += row["result"] == "equal"
    return [engine for engine, _ in counts.most_common()]


def _counts(rows: Iterable[Row]) -> list[str]:
    counts = Counter(row["result"] for row in rows)
    return [str(counts[result]) for result in _RESULTS]


def _reasons(rows: Sequence[Row], engines: Sequence[str]) -> str:
    """Return a table of reasons by engine: checkpoints, and an example."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["result"] == "different":
            found[row["remark"]][row["engine"]].append(row["checkpoint"])
    order = {reason: index for index, reason in enumerate(REASONS)}
    lines = []
    for reason in sorted(found, key=lambda each: (order.get(each, len(order)), each)):
        examples = sorted(name for names in found[reason].values() for name in names)
        counts = [str(len(set(found[reason][engine])) or "") for engine in engines]
        lines.append([reason, *counts, examples[0]])
    return _table(["silently different: the reason", *engines, "example"], lines)


def _refusals(rows: Sequence[Row]) -> list[list[str]]:
    """Return lines of the most frequent messages of each engine."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        if row["result"] == "refused":
            found[row["engine"]][_short(row["remark"])].add(row["checkpoint"])
    lines = []
    for engine, remarks in sorted(found.items()):
        most = sorted(remarks.items(), key=lambda each: -len(each[1]))[:_MOST_REMARKS]
        lines += [[engine, str(len(names)), f"`{remark}`"] for remark, names in most]
    return lines


def _short(remark: str) -> str:
    """Return a message without what differs between checkpoints."""
    text = re.sub(r"board/\S+|'[^']*--[^']*'", "NAME", remark)
    return text.replace("|", "/").replace("`", "'")[:120]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))
