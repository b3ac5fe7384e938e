"""The GPU report of a real server, rehearsed on a CPU."""

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from varlen_bench.gpu_report import judge
from varlen_bench.gpu_report.ahead import kernel_figures
from varlen_bench.gpu_report.figures import MUST_BE_0
from varlen_bench.gpu_report.served_models import Served, served_models, write_repository
from varlen_bench.kernels.machine import Budget

from .conftest import read_csv
from .test_bundle import entry, payload_of, write_bundle_of

pytestmark = pytest.mark.full

# Figures of a load, by what its requests answer.
LATENCIES = {"requests/s", "latency p50", "latency p99", "failed requests"}
STREAMED = {"tokens/s", "first token p50", "between tokens p50", "between tokens p99"}


@pytest.mark.server
@pytest.mark.timeout(1800)
def test_every_stage_of_a_server_passes_and_writes_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "varlen_bench.gpu_report", "--call", "server"]
    command += ["--device", "cpu", "--seconds", "3000", "--output", str(tmp_path)]
    # the server of this environment
    command += ["--bundle", str(tmp_path / "none.pyz")]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        archive.extractall(tmp_path / "files", filter="data")
    names = "models server judge eight peers".split()
    rows = {name: read_csv(tmp_path / f"files/{name}.csv") for name in names}
    summary = (tmp_path / "summary.md").read_text()
    assert "Not passed" not in summary
    assert "A server with models of this GPU" in summary
    checks = [row for each in rows.values() for row in each if row["unit"] == MUST_BE_0]
    assert {row["value"] for row in checks} == {"0"}
    assert {row["case"] for row in rows["judge"]} == {"all models", *served_models("cpu")}
    loads = by_case(row for row in rows["server"] if row["part"] == "load")
    assert loads["minilm embed x1"] == loads["minilm_growing embed x2"] == LATENCIES
    assert loads["llama_1b penalty x2"] == LATENCIES | STREAMED
    assert loads["big translate x1"] == LATENCIES | {"tokens/s"}
    whole = by_case(rows["server"])["all models"]
    assert whole >= {"ready after", "exit status of the server"}
    analyzed = [row["figure"] for row in rows["server"] if row["part"] == "perf_analyzer"]
    assert analyzed == ["served", "p50_ms", "p99_ms"]
    eight = by_case(rows["eight"])
    assert {"big alone", "2 models"} <= eight.keys()
    assert any("memory of a model" in each for each in eight["2 Transformer-big"])
    assert not [row for row in rows["peers"] if "failed" in row["figure"]]


def by_case(rows: Iterable[Mapping[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["case"], set()).add(row["figure"])
    return found


def test_wrong_answers_are_found(tmp_path: Path) -> None:
    served = Served(tmp_path, "cpu", Budget(600))
    assert [row["figure"] for row in write_repository(served)] == ["checkpoint"] * 7
    wrong = {
        "minilm": {"inputs": ["the cat"], "answers": [[1.0] * 32], "alone": [[0.0] * 32]},
        # one token again and again is not the answer of a random model
        "gpt2_small": {"inputs": [[5, 9, 7]], "answers": [[8] * 6], "drawn": [[1, 2], [1, 3]]},
        "big": {"inputs": [[5, 9, 0]], "answers": [[[2] * 6, -99.0]]},
    }
    served.answers.write_text(json.dumps(wrong))

    found = [row for row in judge.judge(served) if row["unit"] == MUST_BE_0]

    assert {(row["case"], row["figure"]): row["value"] for row in found} == {
        ("all models", "models without answers"): 0,
        ("minilm", "wrong vectors"): 2,
        ("gpt2_small", "wrong tokens"): 1,
        ("gpt2_small", "drawn tokens that differ with one seed"): 1,
        ("big", "wrong translations"): 1,
    }


def test_a_bundle_of_other_sources_is_refused(tmp_path: Path) -> None:
    payload = payload_of(entry("lib/data", b"text")).getvalue()
    bundle = write_bundle_of(tmp_path / "a.pyz", payload, sources="others")

    with pytest.raises(RuntimeError, match=r"a\.pyz has other sources than this tree: make bundle"):
        list(write_repository(Served(tmp_path, "cpu", Budget(60), bundle)))


def test_kernels_of_a_replay_have_numbers_times_and_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varlen_bench.gpu_report.ahead._REPLAYS", 2)
    # two replays of a product and a norm, 1 us apart
    events = [(4.0 * i, 4.0 * i + 3.0, ("product", "norm")[i % 2]) for i in range(4)]

    found = {row["figure"]: row["value"] for row in kernel_figures("case", events)}

    assert found == {
        "kernels of a replay": 2.0,
        "replay, first to last kernel": 7.5,
        "gap before a kernel, median": 1.0,
        "1 of product": 3.0,
        "1 of norm": 3.0,
    }
    assert [row["value"] for row in kernel_figures("case", [])] == [0.0]
