"""The benchmark of several outputs: its figures, and a small run of the whole."""

import pytest
from typer.testing import CliRunner

from tests.checkpoints import save_checkpoint
from tests.m3_models import save_m3
from varlen_bench.encoder import EncoderResult
from varlen_bench.outputs import SYSTEMS, OutputsSubject, app
from varlen_tools.convert_pickle import convert

from .conftest import committed_columns, read_csv

pytestmark = pytest.mark.full


def result(name, workload, speeds):
    made = EncoderResult(system=SYSTEMS[name], workload=workload, requests=4, work=100)
    made.rounds = [{"tokens_per_second": speed, "peak_rss_mib": 0.0} for speed in speeds]
    return made


def test_figures_are_times_of_all_outputs_over_the_dense_one_and_speeds_over_the_recipe():
    figures = OutputsSubject().figures(
        [
            result("varlen-fp32", "short only dense", [100.0, 300.0, 110.0]),
            result("varlen-fp32", "short dense", [90.0, 90.0, 90.0]),
            result("varlen-fp32", "short all three", [80.0, 200.0, 100.0]),
            result("varlen-int8", "short only dense", [200.0, 200.0, 200.0]),
            result("varlen-int8", "short all three", [100.0, 100.0, 100.0]),
            result("recipe-fp32-sorted", "short all three", [40.0, 40.0, 40.0]),
            result("recipe-fp32-per-core", "short all three", [50.0, 50.0, 50.0]),
            result("recipe-bf16-sorted", "short all three", [80.0, 80.0, 80.0]),
        ]
    )

    assert figures == {
        "short_fp32_time_ratio": 1.25,
        "short_fp32_vs_recipe": 2.0,
        "short_int8_time_ratio": 2.0,
        # the recipe has no int8
        "short_int8_vs_recipe": None,
    }


def test_a_small_run_has_rows_of_each_set_of_outputs(tmp_path, peers_in_process):
    model = save_m3(save_checkpoint(tmp_path / "m3", "XLMRobertaModel"))
    convert(model)
    output = tmp_path / "outputs.csv"
    arguments = ["--model", str(model), "--rounds", "2", "--sequences", "6", "--queries", "6"]
    arguments += ["--only", "varlen-fp32,recipe-fp32-sorted", "--threads", "1"]

    done = CliRunner().invoke(app, [*arguments, "--output", str(output)])

    assert done.exit_code == 0, done.output
    rows = read_csv(output)
    assert list(rows[0]) == committed_columns("outputs")
    assert len(rows) == 16
    assert {row["outputs"] for row in rows} == {
        "only dense",
        "dense",
        "dense and terms",
        "all three",
    }
    assert {row["workload"] for row in rows} == {"uniform", "short"}
    assert all(float(row["cosine_min"]) > 0.9999 for row in rows)
    assert all(float(row["time_ratio"]) == 1 for row in rows if row["outputs"] == "only dense")
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("BENCH outputs: uniform_fp32_time_ratio=")
