"""The benchmark of the engine's thread: a tiny run of the whole."""

import pytest
from typer.testing import CliRunner

pytest.importorskip("rich")

import typer

from varlen_bench import host_steps

from .conftest import committed_columns, read_csv

APP = typer.Typer()
APP.command()(host_steps.main)


def test_each_case_is_a_row_with_the_time_of_a_step(tmp_path, monkeypatch):
    output = tmp_path / "rows.csv"
    monkeypatch.setattr(host_steps, "_SEQUENCES", (1, 3))

    result = CliRunner().invoke(APP, ["--quick", "--steps", "4", "--output", str(output)])

    assert result.exit_code == 0, result.output
    rows = read_csv(output)
    assert [(row["choice"], row["sequences"], row["steps"]) for row in rows] == [
        (choice, count, "4") for choice in ("greedy", "sampled") for count in "13"
    ]
    assert all(0 < float(row["us"]) <= float(row["us_p20"]) for row in rows)
    assert list(rows[0]) == committed_columns("host_steps")
    assert "BENCH host_steps: greedy_us=" in result.output
