"""The comparison of compiled ops with torch: its rows, and its check of results."""

import csv

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("rich")

import typer

from varlen_bench import cpu_ops

pytestmark = pytest.mark.full

APP = typer.Typer()
APP.command()(cpu_ops.main)


@pytest.fixture(autouse=True)
def two_cases(monkeypatch):
    names = "mixed short, 12 heads of 32", "16 x 3072"
    chosen = [
        call for call in cpu_ops.cases() if call.shape in names and call.dtype == torch.float32
    ]
    monkeypatch.setattr(cpu_ops, "cases", lambda: chosen)
    return chosen


def test_each_case_is_a_row_with_both_times(tmp_path, two_cases):
    output = tmp_path / "rows.csv"

    result = CliRunner().invoke(APP, ["--quick", "--output", str(output)])

    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["case"] for row in rows] == [call.shape for call in two_cases]
    assert all(float(row["reference_us"]) > 0 < float(row["compiled_us"]) for row in rows)
    assert "BENCH cpu_ops: attention_speedup_min=" in result.output


def test_a_wrong_result_ends_the_run(two_cases, monkeypatch):
    case = two_cases[0]
    real = cpu_ops.cpu.attention_varlen
    monkeypatch.setattr(cpu_ops.cpu, "attention_varlen", lambda *a, **k: real(*a, **k).add_(1))

    with pytest.raises(RuntimeError, match="mixed short, .* float32 differs from the reference"):
        cpu_ops.compare(case, rounds=1)
