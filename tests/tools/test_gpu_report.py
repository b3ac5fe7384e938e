"""The GPU report without a GPU: bounded stages, summary, tiny inputs."""

import csv
import importlib
import signal
import sys
import tarfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from varlen_bench.gpu_report import __main__ as command
from varlen_bench.gpu_report import environment, load, measure, products, smoke
from varlen_bench.gpu_report.__main__ import pack, unpack
from varlen_bench.gpu_report.bounded import GRACE_SECONDS, Stage, run_stages
from varlen_bench.gpu_report.figures import MUST_BE_0, figure, within
from varlen_bench.gpu_report.profiled import run_each
from varlen_bench.gpu_report.stages import Call, Files, all_stages
from varlen_bench.gpu_report.summary import (
    count_tests,
    failed_tests,
    is_wrong,
    summary,
    wrong_rows,
)
from varlen_bench.kernels.grid import TINY
from varlen_bench.kernels.machine import Budget, fake_machine
from varlen_bench.ops.call import kernels
from varlen_bench.ops.table import TABLE, op_call

from .bare_machine import run_on_bare_machine

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
# Hangs, after it started a process that ignores Ctrl-C.
HANGING = """
import os, signal, time
child = os.fork()
if not child:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600)
try:
    print(child, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("what I have", flush=True)
"""


def stage(name, code="", seconds=60, **settings):
    """Return a stage that runs this Python code."""
    return Stage(name, seconds, lambda _: [sys.executable, "-S", "-c", code], **settings)


def run(stages, folder, seconds=100):
    return run_stages(stages, seconds, folder, lambda outcomes: None)


# bounded stages


def is_running(process):
    path = Path(f"/proc/{process}/stat")
    # a zombie is a process that has ended
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_stage_that_hangs_is_stopped_with_its_children_and_keeps_its_output(tmp_path):
    (outcome,) = run([stage("hangs", HANGING, seconds=3)], tmp_path)

    assert (outcome.status, outcome.note) == ("out of time", "the limit was 3 s")
    child, kept = (tmp_path / "hangs.log").read_text().splitlines()
    assert kept == "what I have"
    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_a_stage_that_fails_does_not_stop_later_ones(tmp_path):
    saved = []
    stages = [
        stage("raises", "raise ValueError('no such kernel')"),
        Stage("absent", 60, lambda _: ["/no/such/program"]),
        stage("needs more", missing=lambda: "ncu is not installed"),
        stage("works", "import os; print(os.environ['COLOUR'])", environment={"COLOUR": "red"}),
    ]

    outcomes = run_stages(stages, 100, tmp_path, lambda found: saved.append(len(found)))

    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "skipped", "ok"]
    assert outcomes[0].note == "exit status 1"
    assert "No such file" in outcomes[1].note
    assert outcomes[2].note == "ncu is not installed"
    assert "no such kernel" in (tmp_path / "raises.log").read_text()
    assert (tmp_path / "works.log").read_text() == "red\n"
    assert saved == [1, 2, 3, 4]


def test_a_spent_budget_starts_none_of_the_stages_that_are_left(tmp_path):
    limits = []

    def record(seconds):
        limits.append(seconds)
        return [sys.executable, "-S", "-c", ""]

    outcomes = run([Stage("first", 60, record), Stage("second", 5, record)], tmp_path, seconds=19)

    # 10 of 19 seconds are kept to stop a stage, and 9 are too few for one that wants 60
    assert [outcome.status for outcome in outcomes] == ["out of time", "ok"]
    assert outcomes[0].note == "9 s were left"
    assert limits == [5]


# the stages


def stages_of(folder, revision=""):
    """Return the stages of all calls by name."""
    calls = all_stages(Files(folder, revision)).values()
    return {one.name: one for stages in calls for one in stages}


@pytest.mark.parametrize("call", Call)
def test_the_limits_of_a_call_fit_into_its_time(call, tmp_path):
    stages = all_stages(Files(tmp_path))[call]

    assert len({one.name for one in stages}) == len(stages)
    assert sum(one.seconds for one in stages) <= command.SECONDS - GRACE_SECONDS


def test_a_server_is_measured_within_five_minutes(tmp_path):
    stages = all_stages(Files(tmp_path))[Call.SERVER]

    assert sum(one.seconds for one in stages) + GRACE_SECONDS <= 300


def test_the_test_that_hangs_the_gpu_runs_last_in_a_call_of_its_own(tmp_path):
    calls = all_stages(Files(tmp_path))
    paths = {call: str([one.command(60) for one in stages]) for call, stages in calls.items()}

    assert [call for call, text in paths.items() if "tests/" in text] == [Call.TESTS, Call.LOST]
    assert "test_lost_gpu" not in paths[Call.TESTS]
    assert calls[Call.LOST][-1].command(60)[-1] == "tests/kernels/gpu/test_lost_gpu.py"


def test_every_stage_has_a_command_that_its_module_accepts(tmp_path):
    for one in stages_of(tmp_path, revision="abc").values():
        words = list(one.command(one.seconds))
        at = words.index("-m")
        name, arguments = words[at + 1], words[at + 2 :]
        assert words[at - 1] == sys.executable
        if name == "pytest":
            assert Path(arguments[-1]).exists()
            continue
        module = importlib.import_module(f"{name}.__main__" if name.endswith(".kernels") else name)
        if not hasattr(module, "main"):
            assert arguments == []
            continue
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer()
            app.command()(module.main)
        # raises for an option that does not exist
        context = typer.main.get_command(app).make_context(name, arguments)
        # it ends before it is stopped
        assert context.params.get("budget", 0) < one.seconds


def test_stages_without_their_program_or_table_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    stages = stages_of(tmp_path)
    missing = {name: one.missing() for name, one in stages.items() if one.missing()}

    assert missing == dict.fromkeys(("server", "eight", "peers"), "there is no models") | {
        "judge": "there is no answers.json",
        "encoder as tuned": "no launch was tuned",
        "memcheck": "compute-sanitizer is not installed",
        "profiler": "ncu is not installed",
    }
    Files(tmp_path).tuning.write_text("{}")
    assert not stages["encoder as tuned"].missing()


def test_a_server_comes_from_the_bundle_where_this_python_has_none(tmp_path, monkeypatch):
    python = tmp_path / "bin/python"
    monkeypatch.setattr("sys.executable", str(python))
    files = Files(tmp_path / "report", bundle=tmp_path / "a.pyz")
    stages = {one.name: one for one in all_stages(files)[Call.SERVER]}

    absent = stages["models"].missing()
    files.bundle.touch()
    environment = files.served / "environment/bin/python"
    environment.parent.mkdir(parents=True)
    environment.touch()

    assert absent == f"there is no server and no {files.bundle}: make bundle"
    assert not stages["models"].missing()
    # transformers runs in the machine's own Python
    commands = {name: one.command(60)[0] for name, one in stages.items()}
    assert {name for name, each in commands.items() if each == str(environment)} == {
        "server",
        "eight",
    }
    assert commands["judge"] == str(python)


def test_a_bare_machine_can_import_every_stage(tmp_path):
    names = "__main__ environment compile smoke measure profiled".split()
    modules = [f"varlen_bench.gpu_report.{name}" for name in names]
    modules += ["varlen_bench.kernels.__main__", "varlen_bench.tune_kernels"]

    done = run_on_bare_machine(tmp_path, "-c", f"import {', '.join(modules)}, transformers")

    assert done.returncode == 0, done.stderr


def test_the_smoke_test_covers_every_op_and_dtype_and_finds_wrong_ones():
    found = list(smoke.check_all(["bf16"], CPU, kernels("reference")))
    call = op_call("layer_norm", torch.float32, tokens=4, hidden=8)

    wrong = smoke.check(call, CPU, SimpleNamespace(layer_norm=lambda out, **_: out.zero_()))
    fails = smoke.check(call, CPU, SimpleNamespace())

    assert {row["op"] for row in found} == set(TABLE)
    assert {row["note"] for row in found} == {"ok"}
    assert (wrong["note"], wrong["error"]) == ("wrong", 1.0)
    assert fails["note"].startswith("failed: AttributeError")


def test_the_smoke_test_accepts_an_op_that_overwrites_its_inputs():
    call = op_call("beam_step", torch.float32, "edits", batch=2, beams=2, vocabulary=100, longest=3)

    def beam_step(logits, scores, *, edits, **options):
        found = kernels("reference").beam_step(logits, scores, edits=edits, **options)
        logits[edits.rows.long(), edits.tokens.long()] = -torch.inf
        return found

    assert smoke.check(call, CPU, SimpleNamespace(beam_step=beam_step))["note"] == "ok"


def test_the_smoke_command_writes_rows_and_fails_if_an_op_is_wrong(tmp_path, monkeypatch):
    calls = [op_call("layer_norm", torch.float32, tokens=4, hidden=8)]
    monkeypatch.setattr(smoke, "smoke_calls", lambda dtype: calls)
    monkeypatch.setattr(smoke, "finds_gpu", lambda command: True)
    app = typer.Typer()
    app.command()(smoke.main)
    path = tmp_path / "smoke.csv"

    right = CliRunner().invoke(app, ["--dtypes", "fp32", "--output", str(path)])
    calls.append(replace(calls[0], threshold=-1.0))
    wrong = CliRunner().invoke(app, ["--dtypes", "fp32", "--output", str(path)])

    assert (right.exit_code, wrong.exit_code) == (0, 1)
    assert wrong.output.splitlines()[-1].endswith("calls=2 wrong=1")
    with path.open() as file:
        assert [row["note"] for row in csv.DictReader(file)] == ["ok", "ok", "wrong"]


def test_loads_answers_and_rooms_are_measured():
    machine = fake_machine()
    found = list(load.measure_load(TINY.encoders[0], machine, ((2, 5),), 32))
    rooms = list(load.measure_rooms(machine, 32, (4,)))

    assert [(row["part"], row["figure"]) for row in found] == [
        ("load", "first load"),
        ("load", "second load"),
        ("load", "weights and arena"),
        ("answer", "from ids to vectors on the host"),
    ]
    assert all(row["value"] > 0 for row in found)
    assert [row["figure"] for row in rooms] == [
        f"attention with places for {places}" for places in (8, 32, 128)
    ]


def test_products_are_measured_in_both_layouts_and_end_with_the_budget(monkeypatch, capsys):
    monkeypatch.setattr(products, "_TOKENS", (8,))
    monkeypatch.setattr(products, "_WIDTHS", ((16, 32),))
    machine, now = fake_machine(), iter([0, 1, 2, 9])

    found = list(products.measure_products(machine, 8, 16, 32))
    cut_off = list(within(Budget(5, clock=lambda: next(now)), products.measure_all(machine)))

    assert len({(row["case"], row["figure"]) for row in found}) == len(found) == 14
    errors = {row["figure"]: row["value"] for row in found if "error" in row["figure"]}
    assert 0 < min(errors.values()) <= max(errors.values()) < 0.01
    assert len(cut_off) == 3
    assert "the budget of 5 s is spent" in capsys.readouterr().out


def test_the_command_of_figures_appends_the_rows_of_one_name(tmp_path, monkeypatch):
    rows = [figure("load", "tiny", name, 1.5, "s") for name in ("first", "second")]
    monkeypatch.setitem(measure.FIGURES, "load", ("Loads", lambda machine: iter(rows)))
    monkeypatch.setattr(measure, "finds_gpu", lambda command: True)
    monkeypatch.setattr(measure, "gpu_machine", lambda samples: fake_machine())
    app, path = typer.Typer(), tmp_path / "load.csv"
    app.command()(measure.main)

    done = CliRunner().invoke(app, ["load", "--output", str(path)])
    refused = CliRunner().invoke(app, ["loads"])

    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith("figures=2")
    with path.open() as file:
        assert [row["figure"] for row in csv.DictReader(file)] == ["first", "second"]
    assert refused.exit_code == 2


def test_each_kernel_runs_for_the_profiler():
    assert run_each(TINY, CPU, kernels("reference")) == 13


def test_the_environment_names_absent_packages(monkeypatch):
    monkeypatch.setattr(environment, "_PACKAGES", ["torch", "no-such-package"])
    monkeypatch.setattr("shutil.which", lambda name: None)

    lines = environment.lines()

    assert "gpu: nvidia-smi is not installed" in lines
    assert f"packages: torch={metadata.version('torch')} no-such-package=absent" in lines


# the summary


XDIST_LOG = """\
scheduling tests via WorkStealingScheduling
[gw0] [ 25%] PASSED tests/kernels/triton/test_pooling.py::test_a[fp32]
[gw1] [ 50%] FAILED tests/kernels/triton/test_pooling.py::test_b
[gw1] [ 75%] SKIPPED tests/kernels/triton/test_pooling.py::test_c
FAILED tests/kernels/triton/test_pooling.py::test_b - AssertionError
"""
PLAIN_LOG = """\
tests/kernels/gpu/test_served_shapes.py::test_a[bf16-beam] PASSED [ 50%]
tests/kernels/gpu/test_served_shapes.py::test_b ERROR              [100%]
"""


@pytest.mark.parametrize(
    "text, counts, failed",
    [
        (XDIST_LOG, {"passed": 1, "failed": 1, "skipped": 1}, ["triton/test_pooling.py::test_b"]),
        (PLAIN_LOG, {"passed": 1, "error": 1}, ["gpu/test_served_shapes.py::test_b"]),
        ("no tests ran", {}, []),
    ],
    ids=["xdist", "plain", "nothing"],
)
def test_results_of_tests_are_read_from_a_log_that_may_be_cut_off(text, counts, failed, tmp_path):
    log = tmp_path / "tests.log"
    log.write_text(text)

    assert count_tests(log) == counts
    assert failed_tests(log) == [f"tests/kernels/{name}" for name in failed]


def kernel_row(**cells):
    names = "op shape dtype system graph_us eager_us copy_fraction tflops vs_best_peer note"
    return (
        dict.fromkeys(names.split(), "n/a") | {"op": "pool", "system": "varlen", "note": ""} | cells
    )


def write_rows(path, *found):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


def test_the_summary_names_what_failed_and_what_was_skipped(tmp_path):
    files = Files(tmp_path)
    stages = [
        stage("environment", "print('gpu: a fast one')"),
        stage("kernel tests", f"print({XDIST_LOG!r})", checks=True),
        stage("encoder", "print('BENCH kernels: gpu=fast beam_us=8')"),
        stage("memcheck", checks=True, missing=lambda: "compute-sanitizer is not installed"),
    ]
    write_rows(
        files.rows("kernels"),
        kernel_row(shape="1x2", graph_us="12.5", note="a | b"),
        kernel_row(system="torch", graph_us="99.5"),
        kernel_row(op="encoder", system="packed", graph_us="3300"),
    )
    first_load = {"case": "minilm", "figure": "first load", "value": "2", "unit": "s"}
    write_rows(files.rows("load"), {"part": "load", **first_load})

    outcomes = run(stages, tmp_path)
    text = summary(files, outcomes)

    assert "gpu: a fast one" in text
    assert "| memcheck | skipped: compute-sanitizer is not installed |  |  |" in text
    assert "* kernel tests: ok, 1 passed, 1 failed, 1 skipped" in text
    assert "    * tests/kernels/triton/test_pooling.py::test_b" in text
    assert "    BENCH kernels: gpu=fast beam_us=8" in text
    assert "| pool | 1x2 |  | varlen | 12.5 |  |  |  |  | a / b |" in text
    assert "| encoder |  |  | packed | 3300 |" in text
    assert "99.5" not in text
    assert "| load | minilm | first load | 2 | s |" in text


def test_a_report_is_wrong_if_a_check_a_test_or_one_of_our_results_failed(tmp_path):
    files = Files(tmp_path)
    fine = [stage("encoder", "exit(1)"), stage("smoke", checks=True)]
    assert not is_wrong(files, run(fine, tmp_path))
    assert is_wrong(files, run([stage("smoke", "exit(1)", checks=True)], tmp_path))
    cut_off = stage("tests", f"print({PLAIN_LOG!r})", checks=True)
    assert is_wrong(files, run([cut_off], tmp_path))

    late = stage("overlap", "import time; time.sleep(60)", seconds=0.5, checks=True)
    assert is_wrong(files, run([late], tmp_path))
    assert "Not passed: overlap" in summary(files, run([late], tmp_path))

    figure = {"part": "decode", "case": "8x9", "figure": "tokens that differ", "unit": MUST_BE_0}
    write_rows(files.rows("decode"), {**figure, "value": "0"})
    assert not is_wrong(files, [])
    write_rows(files.rows("decode"), {**figure, "value": "2"})
    assert wrong_rows(files) == ["decode, 8x9: tokens that differ: 2"]
    assert is_wrong(files, [])
    files.rows("decode").unlink()

    skipped = kernel_row(note="skipped: the budget of 30 s is spent")
    write_rows(
        files.rows("kernels"), skipped, kernel_row(system="varlen_attn", note="failed: no GPU")
    )
    assert not is_wrong(files, [])
    write_rows(
        files.rows("kernels"), skipped, kernel_row(shape="2x3", dtype="bf16", note="wrong: 3")
    )
    assert is_wrong(files, [])
    assert wrong_rows(files) == ["pool 2x3 bf16: wrong: 3"]


# the command


def invoke(monkeypatch, stages, *arguments, gpu=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(command, "all_stages", lambda files: dict.fromkeys(Call, stages))
    before = signal.getsignal(signal.SIGTERM)
    try:
        return CliRunner().invoke(command.app, arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_command_runs_the_chosen_stages_and_its_status_tells_whether_results_are_wrong(
    tmp_path, monkeypatch
):
    stages = [
        stage("environment", "print('gpu: a fast one')"),
        stage("smoke", "exit(1)", checks=True),
    ]
    folder = tmp_path / "new"

    all_of_them = invoke(monkeypatch, stages, "--output", str(folder))
    one = invoke(monkeypatch, stages, "--output", str(folder), "--only", "env")

    assert all_of_them.exit_code == 1
    assert "gpu-report: results are wrong or incomplete, see" in all_of_them.output
    assert one.exit_code == 0
    assert "smoke" not in (folder / "summary.md").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["report.tar.gz", "summary.md"]
    # the second run adds to the files of the first
    with tarfile.open(folder / "report.tar.gz") as archive:
        assert archive.getnames() == ["environment.log", "smoke.log", "summary.md"]


def test_the_archive_is_written_after_each_stage_and_never_half(tmp_path, monkeypatch):
    folder, seen = tmp_path / "new", []

    def packed(source, archive):
        pack(source, archive)
        seen.append(sorted(path.name for path in folder.iterdir()))

    monkeypatch.setattr(command, "pack", packed)
    invoke(monkeypatch, [stage("environment"), stage("beam")], "--output", str(folder))

    assert seen == [["report.tar.gz", "summary.md"]] * 2


def test_a_report_goes_on_from_its_archive_and_refuses_another_file(tmp_path):
    first, archive, second = tmp_path / "first", tmp_path / "report.tar.gz", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "kernels.csv").write_text("a,b\n")
    unpack(archive, second)
    pack(first, archive)

    unpack(archive, second)

    assert (second / "kernels.csv").read_text() == "a,b\n"
    archive.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"report.tar.gz is no archive of a report; remove it"):
        unpack(archive, second)


def test_a_dry_run_runs_the_stages_without_a_gpu(tmp_path, monkeypatch):
    arguments = ("--output", str(tmp_path), "--dry-run")

    ran = invoke(monkeypatch, [stage("environment")], *arguments, gpu=False)

    assert ran.exit_code == 0
    assert "environment: ok" in ran.output


def test_without_a_gpu_the_command_skips_and_an_unknown_stage_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "new"

    skipped = invoke(monkeypatch, [stage("smoke")], "--output", str(folder), gpu=False)
    refused = invoke(monkeypatch, [stage("smoke")], "--only", "fast")

    assert skipped.exit_code == 0
    assert skipped.output == "gpu-report: skipped, torch finds no CUDA GPU\n"
    assert not folder.exists()
    assert refused.exit_code == 2
    assert "'fast'" in refused.output
