"""The generation benchmark: workloads, passes, figures, and a small run of the whole."""

import importlib
import json
import subprocess
import sys
import time
from concurrent.futures import Future
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from varlen_bench.generate import limit
from varlen_bench.generate.__main__ import app
from varlen_bench.generate.drive import Answer, drive_batches, drive_iterations, figures
from varlen_bench.generate.report import Result, Step, bench_figures, csv_rows, tables
from varlen_bench.generate.run import equal_share
from varlen_bench.generate.systems import OURS, REFERENCE, REQUEST_LEVEL, SYSTEMS
from varlen_bench.generate.worker import Worker
from varlen_bench.generate.workload import Workload, trace_workload, uniform_workload
from varlen_bench.harness.rows import bench_line
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.peers.checkpoints import DecoderShape, save_random_decoder

from .conftest import read_csv
from .virtual_clock import VirtualTime

STATIC, CONTINUOUS = "transformers-fp32-arrival", "transformers-fp32-continuous"


def small_workload(*lengths, due=None):
    """Return requests with these lengths of prompt and output."""
    prompts = [[7] * prompt for prompt, _ in lengths]
    outputs = [output for _, output in lengths]
    return Workload("small", prompts, outputs, due or [0.0] * len(lengths))


def run_batch(prompts, counts, on_token):
    """Generate the token 10 * length of prompt + number, step by step."""
    for step in range(max(counts)):
        for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            if step < count:
                on_token(row, 10 * len(prompt) + step, time.perf_counter())


def test_uniform_requests_fit_the_model_and_repeat_for_a_seed():
    one = uniform_workload(64, vocabulary=100, positions=300, seed=0)

    assert one == uniform_workload(64, vocabulary=100, positions=300, seed=0)
    assert one != uniform_workload(64, vocabulary=100, positions=300, seed=1)
    prompts = list(map(len, one.prompts))
    assert (min(prompts) >= 32, max(prompts) <= 256) == (True, True)
    assert (min(one.outputs) >= 1, max(one.outputs) <= 128) == (True, True)
    assert max(map(sum, zip(prompts, one.outputs, strict=True))) <= 300
    assert all(0 < token < 100 for prompt in one.prompts for token in prompt)


def test_a_trace_gives_both_lengths_in_its_order_scaled_to_the_model(tmp_path):
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:03,{100 * n},{10 * n}" for n in range(1, 101)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")

    found = trace_workload(path, 150, vocabulary=50, positions=1089, seed=3)

    # 99 of 100 requests have at most 10,890 tokens
    assert found.label == "trace azure / 10"
    whole = [10 * output for output in found.outputs]
    assert [len(prompt) for prompt in found.prompts[:40]] == [10 * n for n in found.outputs[:40]]
    assert all(after - before in (10, -990) for before, after in pairwise(whole))
    assert max(len(p) + n for p, n in zip(found.prompts, found.outputs, strict=True)) <= 1089


def test_a_trace_without_its_columns_is_refused(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("when,tokens\nnow,5\n")

    with pytest.raises(ValueError, match="lengths.csv is no trace of requests"):
        trace_workload(path, 1, vocabulary=50, positions=64, seed=0)


def test_poisson_arrivals_have_their_rate_and_the_same_requests():
    whole = small_workload(*[(3, 2)] * 2000)

    due = whole.arriving(rate=50.0, seed=0).due

    assert due == sorted(due)
    assert 2000 / due[-1] == pytest.approx(50.0, rel=0.1)
    assert whole.arriving(50.0, 0) == whole.arriving(50.0, 0)


def test_batches_take_the_requests_that_wait_and_run_to_their_end(monkeypatch):
    VirtualTime.replace(monkeypatch)
    seen = []

    def run(prompts, counts, on_token):
        seen.append([len(prompt) for prompt in prompts])
        time.sleep(0.05)
        run_batch(prompts, counts, on_token)

    # the last two arrive while the first batch runs
    load = small_workload((4, 2), (9, 1), (5, 3), (6, 1), due=[0.0, 0.0, 0.01, 0.02])

    answers = drive_batches(run, load, SYSTEMS["ctranslate2-fp32-sorted"], 2)

    assert seen == [[9, 4], [6, 5]]
    assert [answer.tokens for answer in answers] == [[40, 41], [90], [50, 51, 52], [60]]
    assert [answer.moments[0] for answer in answers] == [0.05, 0.05, 0.1, 0.1]


def test_iterations_start_requests_when_they_are_due(monkeypatch):
    VirtualTime.replace(monkeypatch)
    moments = []

    def submit(prompt, count, on_token):
        moments.append(time.perf_counter())
        run_batch([prompt], [count], on_token)
        done = Future()
        done.set_result(None)
        return done

    answers = drive_iterations(submit, small_workload((4, 2), (5, 1), due=[0.0, 0.1]))

    assert moments == [answer.moments[0] for answer in answers] == [0.0, 0.1]
    assert [answer.tokens for answer in answers] == [[40, 41], [50]]


def test_a_system_that_loses_tokens_is_refused():
    with pytest.raises(RuntimeError, match="generated 1 tokens; expected 3"):
        drive_batches(
            lambda prompts, counts, on_token: on_token(0, 1, 0.0),
            small_workload((2, 3)),
            SYSTEMS[STATIC],
            1,
        )


def test_figures_of_a_pass_are_times_from_arrival():
    answers = [
        Answer(1.0, [1, 2, 3], [1.5, 1.6, 1.8]),
        Answer(2.0, [4], [3.0]),
    ]

    found = figures(answers)

    assert found["tokens_per_second"] == pytest.approx(4 / 2.0)
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == pytest.approx((500, 1000))
    assert (found["per_token_p50_ms"], found["per_token_p99_ms"]) == pytest.approx((800 / 3, 1000))
    assert (found["gap_p50_ms"], found["gap_p99_ms"]) == pytest.approx((100, 200))
    # a single token has no gap
    assert figures(answers[1:])["gap_p50_ms"] is None


def test_a_worker_keeps_its_fastest_batch_size():
    seen = []

    def answer(load, size):
        seen.append((size, len(load.prompts)))
        time.sleep(0.001 if size == 8 else 0.1 * len(load.prompts))
        return drive_batches(run_batch, load, SYSTEMS[STATIC], size)

    worker = Worker(SYSTEMS[STATIC], answer)
    load = small_workload(*[(3, 2)] * 10)

    assert worker.calibrate(load)["size"] == 8
    assert seen == [(1, 4), (4, 4), (8, 8)]
    assert worker.measure(load).keys() >= {"tokens_per_second", "machine_gflops"}
    assert seen[-1] == (8, 10)
    assert Worker(REFERENCE, answer).check(load)["tokens"] == [[30, 31]] * 10


def test_a_worker_imports_only_the_libraries_of_its_engine():
    names = "{'torch', 'transformers', 'ctranslate2', 'varlen'}"
    code = f"import sys, varlen_bench.generate.worker; print({names} & set(sys.modules))"

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_equal_tokens_are_counted_by_position():
    assert equal_share([[1, 2], [3]], [[1, 5], [3]]) == pytest.approx(2 / 3)


def result(name, speeds, arrivals="at once", *, model="gpt2-small", ttft=100.0, note=""):
    made = Result(SYSTEMS[name], model, "small", arrivals, 4, tokens=100, note=note)
    made.rounds = [{"tokens_per_second": speed, "ttft_p99_ms": ttft} for speed in speeds]
    return made


def results_of_a_run():
    return [
        result(OURS, [300.0, 330.0]),
        result(REQUEST_LEVEL, [150.0, 165.0]),
        result(STATIC, [50.0, 55.0]),
        result("transformers-fp32-sorted", [60.0, 66.0]),
        result("ctranslate2-fp32-sorted", [200.0, 220.0]),
        # not of equal precision
        result("ctranslate2-int8-sorted", [900.0, 900.0]),
        result(CONTINUOUS, [], note="did not run: not installed"),
        result(OURS, [90.0], "poisson", ttft=30.0),
        result(STATIC, [80.0], "poisson", ttft=300.0),
        result(REQUEST_LEVEL, [85.0], "poisson", ttft=20.0),
    ]


def test_bench_figures_compare_with_peers_of_equal_precision():
    steps = [Step("gpt2-small", 0.08, 0.05)]

    found = bench_figures(results_of_a_run(), steps, ["gpt2-small", "tiny_gpt2"])

    assert bench_line("generate", found).startswith(
        "BENCH generate: vs_static_batch=5 vs_best_peer=1.5 vs_request_level=2 ttft_p99_ratio=0.1"
        " best_peer=ctranslate2-fp32-sorted tokens_per_second=315 decode_fraction_of_limit=0.625"
        " tiny_gpt2_vs_static_batch=n/a"
    )


def test_a_system_that_did_not_run_keeps_a_row_with_its_reason():
    rows = csv_rows(results_of_a_run(), [Step("gpt2-small", 0.08, 0.05)])

    failed = next(row for row in rows if row["system"] == CONTINUOUS)
    assert (failed["tokens_per_second"], failed["note"]) == (None, "did not run: not installed")
    assert (rows[-1]["step_ms"], rows[-1]["limit_ms"]) == (80, 50)
    assert len({tuple(row) for row in rows}) == 1
    at_once, poisson, step = tables(rows)
    assert at_once.lines[0][0] == "ctranslate2-int8-sorted"
    assert [len(table.lines) for table in (at_once, poisson, step)] == [7, 3, 1]


def test_a_step_cannot_be_faster_than_memory_or_arithmetic(tmp_path, monkeypatch):
    save_random_decoder(TINY, tmp_path)
    monkeypatch.setattr(limit, "read_bandwidth", lambda: 4.0)
    monkeypatch.setattr(limit, "product_rate", lambda hidden: 1e30)
    weights, cached = 12 * 1 * 16**2 + 300 * 16, 2 * 1 * 16 * 32 * (128 + 48)

    assert limit.limit_seconds(tmp_path) == weights + cached

    monkeypatch.setattr(limit, "product_rate", lambda hidden: 1.0)
    assert limit.limit_seconds(tmp_path) == 2 * (32 * weights + cached)


TINY = DecoderShape("tiny", hidden=16, layers=1, heads=2, positions=256, vocabulary=300)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--only", "vllm"], "unknown name 'vllm'"),
        (["--models", "llama"], "unknown name 'llama'"),
        (["--quick", "--repository", "none"], "No such file"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    done = CliRunner().invoke(app, options, env={"COLUMNS": "200"})

    assert done.exit_code == 2
    assert message in done.output


class InProcess:
    """A worker in this process, where transformers need not be imported once more."""

    def __init__(self, module, argument, log, *, threads):
        self.handle = importlib.import_module(module).start(json.loads(json.dumps(argument)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, **order):
        return json.loads(json.dumps(self.handle(json.loads(json.dumps(order)))))


def worker_of(module, argument, log, *, threads):
    kind = WorkerProcess if argument["system"]["engine"] == "varlen" else InProcess
    return kind(module, argument, log, threads=threads)


def test_a_small_run_measures_appends_and_ends_with_the_bench_line(tmp_path, monkeypatch):
    save_random_decoder(TINY, tmp_path / "tiny_gpt2/1")
    monkeypatch.setattr(
        "varlen_bench.generate.run.Comparison.decode_step", lambda _: Step("tiny_gpt2")
    )
    monkeypatch.setattr("varlen_bench.harness.generating.WorkerProcess", worker_of)
    # this process keeps its number of threads
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    output = tmp_path / "generate.csv"
    arguments = ["--quick", "--repository", str(tmp_path), "--requests", "3", "--threads", "1"]
    arguments += ["--only", f"{OURS},{STATIC}", "--output", str(output)]

    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("BENCH generate: tiny_gpt2_vs_static_batch=")
    assert "tiny_gpt2_best_peer=transformers-fp32-arrival" in last
    rows = read_csv(output)
    assert [row["arrivals"] for row in rows] == [
        "at once",
        "at once",
        "poisson",
        "poisson",
        "decode step",
    ]
    # equal to transformers, one prompt at a time
    assert {row["equal_tokens"] for row in rows[:4]} == {"1"}
    assert all(float(row["tokens_per_second"]) > 0 for row in rows[:4])
    assert str(tmp_path) not in output.read_text()
