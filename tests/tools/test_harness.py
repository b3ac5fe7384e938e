"""The harness of the benchmarks: the command line, rows, worker processes, summaries and resident memory."""

import gc
import mmap
import os
import sys
import time
import venv
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tests.closeness import assert_close
from varlen_bench.harness import command, resident, rows, summary
from varlen_bench.harness.accuracy import cosines
from varlen_bench.harness.resident import MIB, resident_peak, sampled_memory
from varlen_bench.harness.rows import csv_table
from varlen_bench.harness.worker import WorkerError, WorkerProcess

from .conftest import read_csv

pytestmark = pytest.mark.full

WORKER = """
import os, sys, time
from varlen_bench.harness.worker import run_worker

def start(argument):
    print("loading", argument["name"])
    if argument["name"] == "broken":
        raise ValueError("no such model")

    def handle(order):
        what = order["do"]
        if what == "print":
            print("a library prints")
            os.system("echo a program prints")
        elif what == "hang":
            time.sleep(60)
        elif what == "fail":
            raise RuntimeError("out of luck")
        elif what == "exit":
            os._exit(3)
        return {"did": what, "threads": os.environ["OMP_NUM_THREADS"]}

    return handle

run_worker(start)
"""
PATH_WORKER = """
import sys
from varlen_bench.harness.worker import run_once

run_once(lambda _: {"path": sys.path})
"""


def test_names_are_selected_in_their_own_order():
    known = ["softmax", "softmax-bf16", "layernorm"]

    assert command.select("", known) == known
    assert command.select("layernorm, softmax", known) == ["softmax", "layernorm"]
    assert command.select("soft", known) == ["softmax", "softmax-bf16"]
    assert command.select(" , ", known) == known
    with pytest.raises(ValueError, match="unknown name 'gelu'; allowed: softmax, softmax-bf16"):
        command.select("softmax,gelu", known)


def benchmark_app(rows_of_run=()):
    """Return the command of a benchmark that appends these rows."""
    app = typer.Typer()

    @app.command()
    def main(
        context: typer.Context,
        only: command.Only = "",
        rounds: int = 5,
        quick: command.Quick = False,
        revision: command.Revision = "",
        output: command.Output = None,
    ) -> None:
        path = command.csv_path("fake", output, is_trial=quick)
        run = command.Run(
            context,
            "varlen_bench.fake",
            threads=3,
            packages=["numpy"],
            output=path,
            revision=revision,
        )
        with run.progress() as report:
            report("half of it")
        run.append(rows_of_run)
        run.show("[a line]")
        print(run.provenance.command)
        run.finish("fake", {"speed": 1.5, "peer": None})

    return app


def test_a_run_reports_appends_and_ends_with_the_bench_line(tmp_path):
    output = tmp_path / "fake.csv"
    arguments = ["--output", str(output), "--only", "a b", "--rounds", "5", "--revision", "abc"]

    done = CliRunner().invoke(benchmark_app([{"speed": 1.5}]), arguments)

    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].endswith(" s  half of it")
    assert lines[1] == "[a line]"
    expected = "python -m varlen_bench.fake --only 'a b' --revision abc --output fake.csv"
    assert lines[2] == expected
    assert lines[3].startswith("rows appended to ")
    assert lines[-1] == "BENCH fake: speed=1.5 peer=n/a"
    (row,) = read_csv(output)
    assert (row["revision"], row["threads"], row["speed"]) == ("abc", "3", "1.5")
    assert row["command"] == expected


def test_a_quick_run_appends_rows_only_to_an_output_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = benchmark_app([{"speed": 1.5}])

    quick = CliRunner().invoke(app, ["--quick"])
    assert "no rows were appended" in quick.output
    assert "--quick" in quick.output
    assert list(tmp_path.iterdir()) == []

    CliRunner().invoke(app, ["--quick", "--output", "named.csv"])
    CliRunner().invoke(app)
    assert (tmp_path / "named.csv").is_file()
    assert (tmp_path / "docs/benchmarks/fake.csv").is_file()


def test_rows_are_appended_under_one_header_and_other_columns_are_refused(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    run = rows.provenance(
        threads=2, packages=["numpy", "no-such-package"], command="x", root=tmp_path
    )

    rows.append_rows(path, run, [])
    assert not path.exists()
    rows.append_rows(path, run, [{"a": 1.23456789, "b": None}])
    rows.append_rows(path, run, [{"a": 2, "b": "two"}])

    found = read_csv(path)
    assert [(row["a"], row["b"]) for row in found] == [("1.23457", "n/a"), ("2", "two")]
    assert found[0]["revision"] == "uncommitted"
    assert "no-such-package=absent" in found[0]["versions"]
    with pytest.raises(ValueError, match="columns"):
        rows.append_rows(path, run, [{"c": 1}])


def test_a_table_shows_the_cells_of_the_csv_in_columns_that_have_some():
    cells = [("a", 1.23456789, ""), ("b", None, None)]
    columns = ["name", "speed_p20", "note"]

    table = csv_table("fast", columns, [dict(zip(columns, row, strict=True)) for row in cells])

    assert table.lines == [["a", "1.23457"], ["b", ""]]
    assert [str(column.header) for column in table.__rich__().columns] == ["name", "speed\np20"]


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Return a function that starts a worker process with a name."""
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    return lambda name="model": WorkerProcess(
        "fake_worker", {"name": name}, tmp_path / "log", threads=3
    )


def test_a_worker_answers_orders_and_its_prints_go_to_the_log(worker, tmp_path):
    with worker() as process:
        assert process.ask(do="print") == {"did": "print", "threads": "3"}
        assert process.ask(do="rest")["did"] == "rest"

    log = (tmp_path / "log").read_text().splitlines()
    assert sorted(log) == ["a library prints", "a program prints", "loading model"]


def test_a_worker_of_another_environment_gets_no_packages_of_this_one(tmp_path):
    venv.create(tmp_path / "other")
    python = tmp_path / "other/bin/python"
    (packages,) = tmp_path.glob("other/lib/python*/site-packages")
    (packages / "fake_worker.py").write_text(PATH_WORKER)

    with WorkerProcess("fake_worker", {}, tmp_path / "log", threads=1, python=python) as process:
        path = process.ask()["path"]

    assert [each for each in path if "site-packages" in each] == [str(packages)]


@pytest.mark.parametrize(
    "name, order, reason",
    [
        ("broken", "rest", "ValueError: no such model"),
        ("model", "fail", "RuntimeError: out of luck"),
        ("model", "exit", "loading model|no output"),
    ],
)
def test_a_worker_that_dies_says_why(worker, name, order, reason):
    with worker(name) as process:
        with pytest.raises(WorkerError, match=f"^({reason})$"):
            process.ask(do=order)
        with pytest.raises(WorkerError):
            process.ask(do="rest")


def test_a_worker_that_hangs_is_killed(worker):
    with worker() as process:
        process.ask(do="rest")
        process._timeout = 0.1
        with pytest.raises(WorkerError, match="^no answer within 0.1 s$"):
            process.ask(do="hang")
    assert process._process.returncode is not None


def test_summaries_of_known_samples():
    assert summary.Spread.of([4, 1, 2, 3, 5]) == summary.Spread(3.0, 1.8, 4.2, 5)
    assert summary.percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.0
    assert summary.flatness([100, 102, 101]) == 2 / 101
    assert summary.ratio(1.0, 2.0) == 0.5
    assert summary.worst(max, [1.0, None, 3.0]) == 3.0
    # the machine halves its speed in the second round: the ratio does not move
    assert summary.paired_ratio([200, 100, 220], [100, 50, 100]) == 2.0


def test_a_missing_figure_stays_missing():
    ratios = [summary.ratio(*pair) for pair in ((None, 2.0), (1.0, None), (1.0, 0.0))]

    assert [*ratios, summary.percentile([], 50), summary.worst(min, [None])] == [None] * 5
    assert summary.rounded(None) is None


def test_cosines_ignore_length_and_see_direction():
    reference = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=np.float32)
    vectors = np.array([[3.0, 0.0], [1.0, 0.0], [-1.0, -1.0]], dtype=np.float32)

    assert_close(cosines(vectors, reference), [1, 0, -1], roundings=2 * 2)


@pytest.mark.parametrize("vectors, reason", [([[np.nan]], "not finite"), ([[1], [1]], "shape")])
def test_cosines_refuse_nan_and_another_shape(vectors, reason):
    with pytest.raises(ValueError, match=reason):
        cosines(np.array(vectors, np.float32), np.ones((1, 1), np.float32))


@contextmanager
def pages_taken(size):
    """Hold new memory of the system: freed blocks of a heap are resident already."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1
        yield


def test_a_peak_is_seen_though_its_memory_is_released():
    if not resident.reset_peak():
        pytest.skip("this kernel does not restart the record of a peak")
    gc.collect()
    with resident_peak() as peak, pages_taken(64 * MIB):
        pass
    with resident_peak() as idle:
        pass

    assert 60 * MIB < peak.above < 100 * MIB
    assert idle.above < 8 * MIB


def test_a_peak_is_sampled_where_the_kernel_does_not_record_it(monkeypatch):
    lists: list[list[int]] = []

    @contextmanager
    def recorded(pid, seconds):
        with sampled_memory(pid, seconds) as samples:
            lists.append(samples)
            yield samples

    monkeypatch.setattr(resident, "reset_peak", lambda: False)
    monkeypatch.setattr(resident, "sampled_memory", recorded)
    gc.collect()
    with resident_peak() as peak, pages_taken(64 * MIB):
        # one sample may have been under way when the memory was filled
        before = len(lists[0])
        while len(lists[0]) < before + 2:
            time.sleep(0.001)

    assert 60 * MIB < peak.above < 100 * MIB


def test_the_memory_of_another_process_can_be_read():
    assert 0 < resident.resident_bytes(1) <= resident.peak_resident_bytes(1)
    with sampled_memory(os.getppid(), seconds=0.001) as samples:
        while len(samples) < 3:
            pass
    assert min(samples) > 0


def test_the_process_of_a_model_is_found_by_its_command_line(tmp_path, monkeypatch):
    for pid, words in {
        "7": ["/kit/triton_python_backend_stub", "model.py", "region", "41", "tiny_0"],
        "8": ["/kit/triton_python_backend_stub", "model.py", "region", "42", "other_0"],
        "9": ["/kit/triton_python_backend_stub", "model.py", "region", "42", "tiny_0_0"],
        "self": ["python"],
    }.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_text("\0".join(words))
    (tmp_path / "10").mkdir()
    monkeypatch.setattr(resident, "Path", lambda _: Path(tmp_path))

    assert resident.model_process(42, "tiny") == 9
    with pytest.raises(RuntimeError, match="no process for the model other"):
        resident.model_process(41, "other")


def test_hosts_that_have_ended_and_forks_of_others_are_left_out(tmp_path, monkeypatch):
    processes = {7: ("varlen 5", "S", 1), 8: ("varlen 5", "S", 7), 9: ("varlen 5", "Z", 1)}
    processes |= {10: ("varlen 55", "S", 1), 11: ("python3", "S", 5)}
    for pid, (name, state, parent) in processes.items():
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "comm").write_text(f"{name}\n")
        (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} 0 0")
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(resident, "Path", lambda _: Path(tmp_path))

    assert resident.hosts_of(5) == [7]
