"""The benchmark of beam search: workloads, passes, figures, and a small run of the whole."""

import statistics

import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from varlen_bench import beam
from varlen_bench.beam import (
    BeamSubject,
    app,
    date_requests,
    equal_latency_ratio,
    news_requests,
)
from varlen_bench.compare.passes import Answer, Requests
from varlen_bench.compare.results import Result
from varlen_bench.harness.rows import bench_line
from varlen_bench.peers.checkpoints import GeneratorShape, save_random_translator
from varlen_bench.workers import beam_step
from varlen_bench.workers.beam import OURS, REQUEST_LEVEL, SYSTEMS, TRANSFORMERS, figures
from varlen_bench.workers.beam_step import mean_survivors, measure_step
from varlen_tools.train_demo.train_dates import train_date_tokenizer

from .conftest import read_csv

pytestmark = pytest.mark.full

CTRANSLATE2 = "ctranslate2-fp32-sorted"
TINY = GeneratorShape("tiny", hidden=16, layers=1, heads=2, positions=64, vocabulary=300)


def test_sentences_have_the_lengths_of_news_and_repeat_for_a_seed():
    one = news_requests(200, vocabulary=100, positions=512, seed=0)

    assert one == news_requests(200, vocabulary=100, positions=512, seed=0)
    assert one != news_requests(200, vocabulary=100, positions=512, seed=1)
    words = sorted(limit / 1.3 for limit in one.limits)
    assert statistics.median(words) == pytest.approx(21, rel=0.05)
    assert words[179] == pytest.approx(38, rel=0.05)
    # the end token comes last, and neither it nor the padding before
    assert [len(source) - 1 for source in one.prompts] == one.limits
    assert all(source[-1] == 0 and min(source[:-1]) >= 2 for source in one.prompts)
    assert max(max(source) for source in one.prompts) < 100
    assert max(map(len, news_requests(50, 100, positions=30, seed=0).prompts)) == 30


def test_dates_are_held_out_dates_in_many_forms(tmp_path):
    tokenizer = train_date_tokenizer(400, seed=0)
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    found = date_requests(tmp_path, 80, seed=0)

    assert found == date_requests(tmp_path, 80, seed=0)
    assert len({tokenizer.decode(ids) for ids in found.prompts}) == 80


def test_figures_of_a_pass_are_times_from_arrival():
    answers = [Answer(1.0, [1, 2], end=1.5), Answer(2.0, [3], end=3.0)]

    found = figures(answers, Requests("", [[7], [7]], [2, 2], [1.0, 2.0]))

    assert found["sentences_per_second"] == pytest.approx(2 / 2.0)
    assert (found["latency_p50_ms"], found["latency_p99_ms"]) == pytest.approx((500, 1000))
    assert found["tokens"] == 3


def test_the_step_alone_finds_the_same_scores_and_counts_survivors(monkeypatch):
    monkeypatch.setattr(beam_step, "_SECONDS", 0.0)
    monkeypatch.setattr(beam_step, "_LEAST_REPEATS", 1)

    found = measure_step(2, 1000)

    assert min(found[f"{name}_us"] for name in ("step", "blocks", "torch", "reorder")) > 0
    assert found["step_vs_torch"] > 0
    # eight groups, so at least eight logits reach the least of their maxima
    assert 8 <= found["survivors"] < 1000


def test_survivors_are_the_logits_above_the_least_maximum_of_the_groups():
    logits = torch.zeros(1, 128)
    # two groups of stripes of 32: the first has the maximum 5, the second 3
    logits[0, [0, 1, 70, 40, 100]] = torch.tensor([5.0, 4.0, 2.0, 3.0, 1.0])

    assert mean_survivors(logits, groups=2) == 3


def result(name, speeds, arrivals="at once", *, rate=None, latency=100.0, note=""):
    about = {"workload": "small", "model": "transformer-base", "arrivals": arrivals, "rate": rate}
    counts = {"requests": 4, "work": 4, "speed": "sentences_per_second"}
    made = Result(system=SYSTEMS[name], **about, **counts, note=note)
    made.rounds = [
        {
            "equal_hypotheses": 4,
            "sentences_per_second": speed,
            "latency_p50_ms": 10.0,
            "latency_p99_ms": latency,
            "tokens": 40.0,
            "machine_gflops": 50.0,
        }
        for speed in speeds
    ]
    return made


def steps(*_):
    names = ("step_us", "blocks_us", "torch_us", "reorder_us", "survivors", "step_vs_torch")
    figures = dict(zip(names, (100.0, 50.0, 400.0, 200.0, 22.0, 4.0), strict=True))
    made = Result(system=beam._STEP, workload="8x4x32000", model="step alone")
    made.rounds = [figures]
    return [made]


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
    subject = BeamSubject()
    subject.prepare()

    found = subject.figures([*results_of_a_run(), *steps()])

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
    results = [*results_of_a_run(), *steps()]
    rows = BeamSubject().rows(results)

    failed = next(row for row in rows if row["note"])
    assert (failed["sentences_per_second"], failed["system"]) == (None, "ctranslate2-int8-sorted")
    assert (rows[-1]["workload"], rows[-1]["step_vs_torch"]) == ("8x4x32000", 4)
    assert len({tuple(row) for row in rows}) == 1
    at_once, poisson, alone = BeamSubject().tables(results)
    assert OURS in at_once.lines[0]
    assert [len(table.lines) for table in (at_once, poisson, alone)] == [5, 4, 1]


def test_a_small_run_measures_appends_and_ends_with_the_bench_line(
    tmp_path, monkeypatch, peers_in_process
):
    checkpoint = tmp_path / "tiny_dates/1"
    save_random_translator(TINY, checkpoint)
    assert Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab_size() == 300
    monkeypatch.setattr(
        beam,
        "date_requests",
        lambda _, count, seed: news_requests(count, 300, 24, seed),
    )
    monkeypatch.setattr(BeamSubject, "measure_steps", steps)
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
