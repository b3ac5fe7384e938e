"""The summary of a GPU report: outcomes, logs and CSV files as Markdown."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from varlen_bench.gpu_report.bounded import Outcome
from varlen_bench.gpu_report.figures import MUST_BE_0
from varlen_bench.gpu_report.measure import FIGURES, SERVED
from varlen_bench.gpu_report.stages import Files
from varlen_bench.kernels.encoder import ENCODER, ENCODER_HOST, ENCODER_OP
from varlen_bench.kernels.measure import OURS, OURS_ON_HOST
from varlen_tools.tables import Table

# A line of pytest -v, with pytest-xdist or without it.
_WITH_XDIST = re.compile(r"^\[gw\d+\] .*?(PASSED|FAILED|ERROR|SKIPPED) (\S.*?)\s*$")
_WITHOUT = re.compile(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")
_MOST_NAMES = 20
_OP_COLUMNS = (
    "op shape dtype system graph_us eager_us copy_fraction tflops vs_best_peer note".split()
)
_FIGURE_COLUMNS = "part case figure value unit".split()

Row = Mapping[str, str]


def summary(files: Files, outcomes: Sequence[Outcome]) -> str:
    """Return the summary of the stages so far."""
    kernels = _read(files.rows("kernels"))
    encoders = {ENCODER, ENCODER_OP, ENCODER_HOST}
    ours = [row for row in kernels if row["system"] == OURS and row["op"] not in encoders]
    lines = ["# GPU report", "", "```", *_log(files, "environment"), "```", ""]
    lines += _table("stage result seconds log".split(), map(_stage_cells, outcomes))
    not_passed = [each.stage.name for each in outcomes if not each.is_passed]
    lines += [f"Not passed: {', '.join(not_passed)}", ""] if not_passed else []
    lines += ["## Correctness", "", *_correctness(files, outcomes), ""]
    lines += ["## Last lines", "", *_bench_lines(files, outcomes), ""]
    encoder_rows = [row for row in kernels if row["op"] in encoders]
    for title, rows, columns in (
        ("Encoder", encoder_rows, _OP_COLUMNS),
        ("Ops", ours, _OP_COLUMNS),
        *(
            (title, _read(files.rows(name)), _FIGURE_COLUMNS)
            for name, (title, _) in [*FIGURES.items(), *SERVED.items()]
        ),
    ):
        if rows:
            lines += [f"## {title}", ""]
            lines += _table(columns, ([row[name] for name in columns] for row in rows))
    return "\n".join(lines)


def is_wrong(files: Files, outcomes: Sequence[Outcome]) -> bool:
    """Return whether a check or a result of ours failed, or ended too late."""
    checks = [outcome for outcome in outcomes if outcome.stage.checks]
    return (
        not all(outcome.is_passed for outcome in checks)
        or any(failed_tests(files.folder / outcome.stage.log_name) for outcome in checks)
        or bool(wrong_rows(files))
    )


def wrong_rows(files: Files) -> list[str]:
    """Return a line per wrong or failed result of ours."""
    smoke = [row for row in _read(files.rows("smoke")) if row["note"] != "ok"]
    ours = [row for row in _read(files.rows("kernels")) if row["system"] in {OURS, OURS_ON_HOST}]
    # a call that was skipped is not wrong
    wrong = [row for row in ours if re.search(r"\b(wrong|failed)\b", row["note"])]
    figures = [row for name in (*FIGURES, *SERVED) for row in _read(files.rows(name))]
    return [
        f"{row['op']} {row['shape']} {row['dtype']}: {row['note']}" for row in smoke + wrong
    ] + [
        f"{row['part']}, {row['case']}: {row['figure']}: {row['value']}"
        for row in figures
        if row["unit"] == MUST_BE_0 and row["value"] != "0"
    ]


def count_tests(log: Path) -> dict[str, int]:
    """Return the number of tests by result in a log of pytest -v."""
    counts: dict[str, int] = {}
    for _, result in _results(log):
        counts[result.lower()] = counts.get(result.lower(), 0) + 1
    return counts


def failed_tests(log: Path) -> list[str]:
    """Return the names of tests that failed in a log of pytest -v."""
    return [name for name, result in _results(log) if result in {"FAILED", "ERROR"}]


def _results(log: Path) -> Iterable[tuple[str, str]]:
    for line in _lines(log):
        if found := _WITH_XDIST.match(line):
            yield found[2], found[1]
        elif found := _WITHOUT.match(line):
            yield found[1], found[2]


def _correctness(files: Files, outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    for outcome in outcomes:
        if not outcome.stage.checks:
            continue
        log = files.folder / outcome.stage.log_name
        counts = ", ".join(f"{count} {result}" for result, count in count_tests(log).items())
        lines.append(f"* {outcome.stage.name}: {outcome.status}{f', {counts}' if counts else ''}")
        failed = failed_tests(log)
        lines += [f"    * {name}" for name in failed[:_MOST_NAMES]]
        if failed[_MOST_NAMES:]:
            lines.append(f"    * and {len(failed) - _MOST_NAMES} more")
    return lines + [f"* wrong: {line}" for line in wrong_rows(files)]


def _bench_lines(files: Files, outcomes: Sequence[Outcome]) -> list[str]:
    logs = (_lines(files.folder / outcome.stage.log_name) for outcome in outcomes)
    return [f"    {line}" for log in logs for line in log if line.startswith("BENCH ")]


def _stage_cells(outcome: Outcome) -> list[str]:
    result = f"{outcome.status}: {outcome.note}" if outcome.note else outcome.status
    seconds = f"{outcome.seconds:.0f}" if outcome.status != "skipped" else ""
    log = outcome.stage.log_name if outcome.status != "skipped" else ""
    return [outcome.stage.name, result, seconds, log]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [["" if cell == "n/a" else cell for cell in row] for row in rows]
    return [*Table("", columns, lines).markdown(), ""]


def _log(files: Files, name: str) -> list[str]:
    return _lines(files.folder / f"{name}.log")


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.is_file() else []


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
