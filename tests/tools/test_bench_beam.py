"""The benchmark of beam search: workloads, passes, figures, and a small run of the whole."""

import importlib
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import Future

import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from varlen_bench.beam import step
from varlen_bench.beam.__main__ import app
from varlen_bench.beam.drive import Answer, drive_batches, drive_iterations, figures
from varlen_bench.beam.report import Result, bench_figures, csv_rows, equal_latency_ratio, tables
from varlen_bench.beam.step import StepTimes, mean_survivors, measure_step
from varlen_bench.beam.systems import OURS, REQUEST_LEVEL, SYSTEMS, TRANSFORMERS
from varlen_bench.beam.worker import Worker
from varlen_bench.beam.workload import Workload, date_workload, news_workload
from varlen_bench.harness.arrivals import exponential_times
from varlen_bench.harness.rows import bench_line
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.peers.checkpoints import TranslatorShape, save_random_translator
from varlen_tools.train_demo.train_dates import train_date_tokenizer

from .conftest import read_csv
from .virtual_clock import VirtualTime

CTRANSLATE2 = "ctranslate2-fp32-sorted"
TINY = TranslatorShape(
    "tiny", hidden=16, layers=1, heads=2, features=32, positions=64, vocabulary=300
)


def small_workload(*lengths, due=None):
    """Return requests with these lengths of sources."""
    sources = [[7] * length for length in lengths]
    return Workload("small", sources, [2] * len(lengths), due or [0.0] * len(lengths))


def answer_batch(sources, limits):
    """Answer with the length of each source."""
    return [[len(source)] * limit for source, limit in zip(sources, limits, strict=True)]


def test_sentences_have_the_lengths_of_news_and_repeat_for_a_seed():
    one = news_workload(200, vocabulary=100, positions=512, seed=0)

    assert one == news_workload(200, vocabulary=100, positions=512, seed=0)
    assert one != news_workload(200, vocabulary=100, positions=512, seed=1)
    words = sorted(limit / 1.3 for limit in one.limits)
    assert statistics.median(words) == pytest.approx(21, rel=0.05)
    assert words[179] == pytest.approx(38, rel=0.05)
    # the end token comes last, and neither it nor the padding before
    assert [len(source) - 1 for source in one.sources] == one.limits
    assert all(source[-1] == 0 and min(source[:-1]) >= 2 for source in one.sources)
    assert max(max(source) for source in one.sources) < 100
    assert max(map(len, news_workload(50, 100, positions=30, seed=0).sources)) == 30


def test_dates_are_held_out_dates_in_many_forms(tmp_path):
    tokenizer = train_date_tokenizer(400, seed=0)
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    found = date_workload(tmp_path, 80, seed=0)

    assert found == date_workload(tmp_path, 80, seed=0)
    assert len({tokenizer.decode(ids) for ids in found.sources}) == 80


def test_arrivals_have_their_rate():
    due = exponential_times(2000, rate=50.0, seed=0)

    assert due == sorted(due)
    assert 2000 / due[-1] == pytest.approx(50.0, rel=0.1)


def test_batches_take_the_longest_sources_that_wait(monkeypatch):
    VirtualTime.replace(monkeypatch)
    seen = []

    def run(sources, limits):
        seen.append([len(source) for source in sources])
        time.sleep(0.8)
        return answer_batch(sources, limits)

    # the last two arrive while the first batch runs
    load = small_workload(4, 9, 5, 6, due=[0.0, 0.0, 0.5, 0.6])

    answers = drive_batches(run, load, SYSTEMS[TRANSFORMERS], 2)

    assert seen == [[9, 4], [6, 5]]
    assert [answer.tokens for answer in answers] == [[4, 4], [9, 9], [5, 5], [6, 6]]
    assert [answer.moment for answer in answers] == [0.8, 0.8, 1.6, 1.6]


def test_iterations_start_requests_when_they_are_due(monkeypatch):
    VirtualTime.replace(monkeypatch)
    moments = []

    def submit(source, limit):
        moments.append(time.perf_counter())
        done = Future()
        done.set_result([len(source)] * limit)
        return done

    answers = drive_iterations(submit, small_workload(4, 5, due=[0.0, 0.1]))

    assert moments == [answer.moment for answer in answers] == [0.0, 0.1]
    assert [answer.tokens for answer in answers] == [[4, 4], [5, 5]]


def test_figures_of_a_pass_are_times_from_arrival():
    found = figures([Answer(1.0, [1, 2], 1.5), Answer(2.0, [3], 3.0)])

    assert found["sentences_per_second"] == pytest.approx(2 / 2.0)
    assert (found["latency_p50_ms"], found["latency_p99_ms"]) == pytest.approx((500, 1000))
    assert found["tokens"] == 3


def test_a_worker_keeps_its_fastest_batch_size():
    def answer(load, size):
        time.sleep(0.001 if size == 8 else 0.05 * len(load.sources))
        return drive_batches(answer_batch, load, SYSTEMS[TRANSFORMERS], size)

    worker = Worker(SYSTEMS[TRANSFORMERS], answer)
    load = small_workload(*range(1, 11))

    assert worker.calibrate(load)["size"] == 8
    measured = worker.measure(load)
    assert measured["answers"] == answer_batch(load.sources, load.limits)
    assert measured["figures"].keys() >= {"sentences_per_second", "machine_gflops"}


def test_a_worker_imports_only_the_libraries_of_its_engine():
    names = "{'torch', 'transformers', 'ctranslate2', 'varlen'}"
    code = f"import sys, varlen_bench.beam.worker; print({names} & set(sys.modules))"

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_the_step_alone_finds_the_same_scores_and_counts_survivors(monkeypatch):
    monkeypatch.setattr(step, "_SECONDS", 0.0)
    monkeypatch.setattr(step, "_LEAST_REPEATS", 1)

    found = measure_step(2, 1000)

    assert min(found.step_us, found.blocks_us, found.torch_us, found.reorder_us) > 0
    # eight groups, so at least eight logits reach the least of their maxima
    assert 8 <= found.survivors < 1000


def test_survivors_are_the_logits_above_the_least_maximum_of_the_groups():
    logits = torch.zeros(1, 128)
    # two groups of stripes of 32: the first has the maximum 5, the second 3
    logits[0, [0, 1, 70, 40, 100]] = torch.tensor([5.0, 4.0, 2.0, 3.0, 1.0])

    assert mean_survivors(logits, groups=2) == 3


def result(name, speeds, arrivals="at once", *, rate=None, latency=100.0, note=""):
    made = Result(SYSTEMS[name], "transformer-base", "small", arrivals, 4, rate, note=note)
    made.equal = 4
    made.rounds = [
        {
            "sentences_per_second": speed,
            "latency_p50_ms": 10.0,
            "latency_p99_ms": latency,
            "tokens": 40.0,
            "machine_gflops": 50.0,
        }
        for speed in speeds
    ]
    return made


def results_of_a_run():
    return [
        result(OURS, [30.0, 33.0]),
        result(REQUEST_LEVEL, [15.0, 16.5]),
        result(TRANSFORMERS, [10.0, 11.0]),
        result(CTRANSLATE2, [20.0, 22.0]),
        # not of equal precision
        result("ctranslate2-int8-sorted", [], note="did not run: not installed"),
        result(OURS, [5.0], "poisson", rate=5.0, latency=20.0),
        result(TRANSFORMERS, [5.0], "poisson", rate=5.0, latency=100.0),
        result(OURS, [10.0], "poisson", rate=10.0, latency=60.0),
        result(OURS, [20.0], "poisson", rate=20.0, latency=140.0),
    ]


def test_bench_figures_compare_with_peers_of_equal_precision():
    steps = [StepTimes(8, 32_000, 100.0, 50.0, 400.0, 200.0, 22.0)]

    found = bench_figures(results_of_a_run(), steps, ["transformer-base", "tiny_dates"])

    assert bench_line("beam", found) == (
        "BENCH beam: vs_transformers=3 vs_transformers_poisson=3 vs_best_peer=1.5"
        " best_peer=ctranslate2-fp32-sorted equal_hypotheses=1 dates_vs_transformers=n/a"
        " dates_vs_transformers_poisson=n/a dates_vs_best_peer=n/a dates_best_peer=n/a"
        " dates_equal_hypotheses=n/a step_vs_torch=4 step_us=100"
    )


def test_the_rate_at_equal_latency_is_between_two_rates_and_can_be_sustained():
    ours, others = results_of_a_run()[:1], results_of_a_run()[5:]

    # half way between 10 and 20 requests/s
    assert equal_latency_ratio(ours + others) == pytest.approx(15 / 5)
    assert equal_latency_ratio(ours + others[:-1]) == pytest.approx(10 / 5)
    assert equal_latency_ratio([result(OURS, [12.0]), *others]) == pytest.approx(12 / 5)
    too_slow = result(OURS, [5.0], "poisson", rate=5.0, latency=200.0)
    assert equal_latency_ratio([*ours, too_slow, others[1]]) == pytest.approx(0.5)
    assert equal_latency_ratio([*ours, others[0]]) is None


def test_a_system_that_did_not_run_keeps_a_row_with_its_reason():
    steps = [StepTimes(8, 32_000, 100.0, 50.0, 400.0, 200.0, 22.0)]
    rows = csv_rows(results_of_a_run(), steps)

    failed = next(row for row in rows if row["note"])
    assert (failed["sentences_per_second"], failed["system"]) == (None, "ctranslate2-int8-sorted")
    assert (rows[-1]["workload"], rows[-1]["step_vs_torch"]) == ("8x4x32000", 4)
    assert len({tuple(row) for row in rows}) == 1
    at_once, poisson, alone = tables(rows)
    assert OURS in at_once.lines[0]
    assert [len(table.lines) for table in (at_once, poisson, alone)] == [5, 4, 1]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--only", "vllm"], "unknown name 'vllm'"),
        (["--model", "llama"], "unknown name 'llama'"),
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
    is_ours = argument["system"]["engine"] == "varlen"
    return (WorkerProcess if is_ours else InProcess)(module, argument, log, threads=threads)


def test_a_small_run_measures_appends_and_ends_with_the_bench_line(tmp_path, monkeypatch):
    checkpoint = tmp_path / "tiny_dates/1"
    save_random_translator(TINY, checkpoint)
    assert Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab_size() == 300
    monkeypatch.setattr(
        "varlen_bench.beam.__main__.date_workload",
        lambda _, count, seed: news_workload(count, 300, 24, seed),
    )
    times = StepTimes(8, 32_000, 100.0, 50.0, 400.0, 200.0, 22.0)
    monkeypatch.setattr("varlen_bench.beam.__main__.measure_steps", lambda **_: [times])
    monkeypatch.setattr("varlen_bench.harness.generating.WorkerProcess", worker_of)
    # this process keeps its number of threads
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    output = tmp_path / "beam.csv"
    arguments = ["--quick", "--repository", str(tmp_path), "--requests", "3", "--threads", "1"]
    arguments += ["--load", "0.9", "--only", f"{OURS},{TRANSFORMERS}", "--output", str(output)]

    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("BENCH beam: dates_vs_transformers=")
    assert "dates_best_peer=transformers-fp32-sorted dates_equal_hypotheses=1" in last
    assert last.endswith("step_vs_torch=4 step_us=100")
    rows = read_csv(output)
    assert [row["arrivals"] for row in rows[:4]] == ["at once"] * 2 + ["poisson"] * 2
    assert rows[-1]["workload"] == "8x4x32000"
    # equal to transformers, one source at a time
    assert {row["equal_hypotheses"] for row in rows[:-1]} == {"3"}
    assert all(float(row["sentences_per_second"]) > 0 for row in rows[:-1])
    assert str(tmp_path) not in output.read_text()
