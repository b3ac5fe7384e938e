"""The arithmetic of the serving benchmark: rows, the search, metrics, the BENCH lines, the page."""

import base64
import html
import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from varlen_bench.harness.generator import LoadRecord, RequestRecord
from varlen_bench.harness.rows import Provenance, bench_line
from varlen_bench.serving import perf_analyzer, report, server
from varlen_bench.serving.__main__ import Search, is_hopeless
from varlen_bench.serving.report import bench_figures, lone_figures, overload_figures
from varlen_bench.serving.server import (
    DYNAMIC_BATCHER,
    OURS,
    OURS_FP32,
    SYSTEMS,
    TOKEN_BUDGET,
    Served,
    counted,
)
from varlen_bench.workers.serving import Load, Row, load_row, max_waiting, seconds_at
from varlen_bench.workloads import Mix, named_mix

pytestmark = pytest.mark.full

UNIFORM, SHORT = Mix("uniform", "uniform 5-500", (5,)), Mix("short", "uniform 2-100", (2,))
RUN = Provenance("2026-01-01T00:00:00Z", "abc", "a <fast> cpu x2", 2, "python=3.11", "python -m x")


def row_of(*requests, not_sent=(), end=4.0, **options):
    record = LoadRecord([RequestRecord(n, *one) for n, one in enumerate(requests)], [*not_sent])
    record.end = end
    return load_row(Load("load", UNIFORM, 3.0, seed=0, rate=2.0, **options), OURS, record)


def test_a_row_counts_all_and_measures_what_comes_after_the_warm_up():
    row = row_of(
        (0.5, 0.5, 3.5, "ok"),  # warms up; its answer is served in the measured seconds
        (1.0, 1.1, 1.2, "ok"),
        (2.0, 2.0, 2.4, "ok"),
        (2.5, 2.5, 2.51, "refused"),
        (3.0, 3.0, 3.9, "failed"),
        (3.5, 3.5, None, "unanswered"),
        (3.6, 3.6, 4.6, "ok"),  # too late to be served in them
        not_sent=[3.2],
        deadline_ms=400,
    )

    assert (row.lengths, row.system, row.kind, row.offered) == (UNIFORM.label, OURS, "load", 2.0)
    assert (row.sent, row.ok, row.refused, row.failed, row.lost) == (7, 4, 1, 1, 1)
    assert (row.warmup, row.not_sent) == (1, 1)
    assert row.served == pytest.approx(3 / 3)
    assert row.share == pytest.approx(3 / 7)
    assert row.seconds == 3.0
    assert (row.p50_ms, row.p99_ms) == pytest.approx((400, 1000))
    assert row.mean_ms == pytest.approx((200 + 400 + 1000) / 3)
    assert row.lateness_p99_ms == pytest.approx(100)
    assert row.refused_p99_ms == pytest.approx(10)
    # from when they were sent: 100, 400 and 1000 ms
    assert row.kept_deadline == pytest.approx(2 / 3)
    assert row.note == ""


def test_a_load_that_was_given_up_ends_there():
    row = row_of((1.0, 1.0, 1.1, "ok"), (2.0, 2.0, 3.0, "ok"), not_sent=[2.5, 3.0, 3.5], end=2.0)

    assert row.seconds == 1.0
    assert row.served == pytest.approx(1.0)
    assert row.share == pytest.approx(2 / 5)
    assert row.note == "given up: too many were late"
    assert not row.is_sustained
    # a request that is not sent in between ends nothing
    other = row_of((1.0, 1.0, 1.1, "ok"), (3.5, 3.5, 3.6, "ok"), not_sent=[2.5], end=3.5)
    assert other.seconds == 3.0


def test_a_sustained_load_is_a_quick_answer_to_nearly_all_and_some_answer_to_all():
    sustained = Row("", OURS, "load", share=0.98, p99_ms=500.0, lost=0)

    assert sustained.is_sustained
    for failure in ({"p99_ms": 500.1}, {"share": 0.979}, {"lost": 1}, {"p99_ms": None}):
        assert not replace(sustained, **failure).is_sustained


def searched(capacity, truth, steps):
    """Return what a search finds if loads up to `truth` are sustained, and its rates."""
    search, tried = Search(capacity, steps), []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.record(rate, is_sustained=rate <= truth)
    return search.sustained, tried


@pytest.mark.parametrize("truth", [3.0, 5.0, 7.9, 9.5, 11.0, 14.0])
def test_the_search_approaches_what_is_sustained(truth):
    few, many = searched(10.0, truth, 4)[0], searched(10.0, truth, 10)[0]

    assert 0.8 * truth < few <= many <= truth
    assert many == pytest.approx(truth, rel=0.02)


def test_the_search_tries_no_more_than_it_may():
    assert [len(searched(10.0, 6.0, steps)[1]) for steps in (0, 1, 4)] == [0, 1, 4]
    assert searched(0.0, 6.0, 4)[1] == []
    # the light load is known and no step; a load that passes above one that fails does not count
    search = Search(10.0, 2)
    search.record(3.0, is_sustained=True, is_step=False)
    search.record(9.0, is_sustained=True)
    search.record(8.0, is_sustained=False)
    assert search.next_rate() is None
    assert search.sustained == 3.0


def test_a_slow_system_is_measured_for_longer_and_holds_fewer_requests():
    # without an answer in the measured seconds it still has a capacity
    assert Row("", OURS, "closed", seconds=2.0, ok=5, served=0.0).capacity == 0.5
    assert [seconds_at(rate, 8.0) for rate in (100.0, 10.0, 1.0)] == [8.0, 10.0, 12.0]
    assert (max_waiting(1.0), max_waiting(30.2)) == (16, 91)


def test_only_a_peer_that_cannot_be_the_best_is_searched_less():
    rows = [Row("", OURS, "result", sustained=40.0)]
    peer = SYSTEMS["transformers-bf16-single"]

    assert not is_hopeless(peer, 9.0, rows)
    rows.append(Row("", "onnxruntime-fp32-single", "result", sustained=10.0))
    assert is_hopeless(peer, 9.0, rows)
    assert not is_hopeless(peer, 11.0, rows)
    assert not is_hopeless(SYSTEMS[DYNAMIC_BATCHER], 9.0, rows)
    assert not is_hopeless(SYSTEMS[OURS], 9.0, rows)


def test_a_row_has_what_the_system_counted_once_all_answers_are_in_its_metrics(monkeypatch):
    requests, tokens = (
        'varlen_requests_total{model="varlen-dp"} ',
        "varlen_tokens_total",
    )
    pages = [f'{requests}{n}\n{tokens}{{model="varlen-dp"}} {n * 9}\n' for n in (5, 5, 8, 11)]
    monkeypatch.setattr(server, "fetch_metrics", lambda url, timeout: pages.pop(0))
    monkeypatch.setattr(server, "model_process", lambda pid, model: 7)
    monkeypatch.setattr(server, "family_bytes", lambda pid: 3 << 20)
    answer = asdict(Row(UNIFORM.label, OURS, "closed", sent=7, lost=1))
    generator = SimpleNamespace(ask=lambda models, load: answer)
    local = SimpleNamespace(pid=1, metrics_url="url")

    row = Served(SYSTEMS[OURS], local, generator, "").measure(Load("closed", UNIFORM, 1.0, 0))

    assert pages == []
    assert (row.sent, row.lost, row.rss_mib, row.padding_share) == (7, 1, 3.0, None)
    assert row.machine_gflops > 0


def test_ours_counts_padding_and_predictions_and_a_peer_its_batches():
    peer = {"nv_inference_count": 9.0, "nv_inference_exec_count": 3.0}
    tokens = {"varlen_tokens_total": 300.0, "varlen_padding_tokens_total": 100.0}
    ours = {"varlen_batch_sequences_sum": 8.0, "varlen_batch_sequences_count": 2.0}
    seconds = {"varlen_batch_seconds_sum": 2.0, "varlen_batch_predicted_seconds_sum": 2.2}
    requests = {"varlen_requests_total": 8.0}

    def figures(*metrics):
        return list(counted({name: one[name] for one in metrics for name in one}).values())

    assert figures(peer, requests, ours, tokens, seconds) == [4.0, 0.25, pytest.approx(0.1)]
    assert figures(peer) == [3.0, None, None]
    assert figures(requests, {"varlen_tokens_total": 9.0}) == [None, None, None]
    assert figures() == [None, None, None]


def a_row(name, offered, *, kind="load", mix=UNIFORM, **changes):
    figures = {"offered": offered, "seconds": 8.0, "sent": 80, "ok": 80, "served": offered}
    counts = dict.fromkeys(("warmup", "refused", "failed", "lost", "not_sent"), 0)
    latency = {"mean_ms": 50.0, "p50_ms": 40.0, "p99_ms": 200.0, "lateness_p99_ms": 2.0}
    return Row(mix.label, name, kind, **(figures | counts | latency | changes))


def rows_of_a_run():
    rows = []
    for mix, scale in ((UNIFORM, 1), (SHORT, 10)):
        for name, sustained, saturated in (
            (TOKEN_BUDGET, 20.0, 25.0),
            (OURS, 22.0, 26.0),
            (OURS_FP32, 18.0, 20.0),
            ("varlen-dp-padded", 15.0, 24.0),
            ("varlen-fifo-padded", 8.0, 12.0),
            (DYNAMIC_BATCHER, 4.0, 6.0),
            ("onnxruntime-fp32-single", 11.0, 12.0),
        ):
            rate, served = scale * sustained, scale * saturated
            for light, speed in ((0.3 * rate, 90.0), (0.6 * rate, 160.0)):
                rows.append(a_row(name, light, mix=mix, machine_gflops=speed))
            rows.append(a_row(name, rate, mix=mix, p99_ms=450.0, machine_gflops=100.0))
            rows.append(a_row(name, 52.0 * scale, kind="most", mix=mix, served=served, not_sent=9))
            figures = {"sustained": rate, "saturated": served, "cosine_min": 0.99999}
            rows.append(Row(mix.label, name, "result", rss_mib=400.0, **figures))
        for turn, faster in ((0, 0.8), (1, 0.9)):
            for name, ratio in ((TOKEN_BUDGET, 1.0), (OURS, faster)):
                latency = {"mean_ms": 100.0 * ratio, "p99_ms": 300.0 / ratio, "turn": turn}
                rows.append(
                    a_row(name, 12.0, kind="paired", mix=mix, machine_gflops=9.0, **latency)
                )
    return rows


def test_the_bench_line_holds_the_keys_in_order():
    figures = bench_figures(rows_of_a_run(), [SHORT, UNIFORM])

    assert bench_line("serving", figures) == (
        "BENCH serving: sustained_vs_dynamic_batcher=5.5 sustained_vs_best_peer=2 "
        "fp32_vs_dynamic_batcher=4.5 fp32_vs_best_fp32_peer=1.6364 int8_vs_best_fp32_peer=n/a "
        "int8_vs_best_int8_peer=n/a "
        "dp_padded_vs_fifo_padded=2 dp_mean_vs_token_budget=0.8485 "
        "dp_p99_vs_token_budget=1.1785 lost=0 "
        "short_sustained_vs_dynamic_batcher=5.5 short_sustained_vs_best_peer=2 short_fp32_vs_dynamic_batcher=4.5 "
        "short_fp32_vs_best_fp32_peer=1.6364 short_int8_vs_best_fp32_peer=n/a "
        "short_int8_vs_best_int8_peer=n/a "
        "short_dp_padded_vs_fifo_padded=2 short_dp_mean_vs_token_budget=0.8485 "
        "short_dp_p99_vs_token_budget=1.1785"
    )


def test_what_did_not_run_has_no_figure_and_what_was_lost_counts_everywhere():
    rows = [
        row for row in rows_of_a_run() if row.system != DYNAMIC_BATCHER and row.kind != "paired"
    ]
    rows.append(a_row("varlen-none", 3.0, mix=SHORT, lost=2))

    assert bench_line("serving", bench_figures(rows, [UNIFORM])) == (
        "BENCH serving: sustained_vs_dynamic_batcher=n/a sustained_vs_best_peer=2 "
        "fp32_vs_dynamic_batcher=n/a fp32_vs_best_fp32_peer=1.6364 int8_vs_best_fp32_peer=n/a "
        "int8_vs_best_int8_peer=n/a "
        "dp_padded_vs_fifo_padded=2 dp_mean_vs_token_budget=n/a "
        "dp_p99_vs_token_budget=n/a lost=2"
    )
    trace = bench_figures([], [Mix("trace", "trace azure / 8", (1,))])
    assert next(iter(trace)) == "trace_sustained_vs_dynamic_batcher"


def test_a_request_that_is_alone_is_compared_with_the_fastest_peer_of_its_precision():
    mix = Mix("lone_3", "lone 3", (3,))
    times = {OURS_FP32: (4.0, 2.0, 3.0), "onnxruntime-fp32-single": (5.0, 6.0, 90.0)}
    times |= {"openvino-fp32-single": (7.0, 7.0, 7.0), "openvino-int8-single": (1.0, 1.0, 1.0)}
    rows = [
        Row(mix.label, system, "lone", p50_ms=time, turn=turn, lost=turn // 2)
        for system, each in times.items()
        for turn, time in enumerate(each)
    ]

    figures = lone_figures(rows, [mix])

    assert figures["lone_3_fp32_vs_fp32_peer"] == 3.0 / 6.0
    assert figures["lone_3_int8_vs_int8_peer"] is None
    assert figures["lost"] == 4
    (table,) = [each for each in report.tables(rows) if "one by one" in each.title]
    assert table.lines[0] == [OURS_FP32, "3.0 (2.0-4.0)"]


def test_the_worst_of_every_overload_is_reported():
    light = {"refused_p99_ms": 9.0, "kept_deadline": 1.0, "refused": 40}
    heavy = {"refused_p99_ms": 30.0, "kept_deadline": 0.995, "failed": 1}
    loads = [a_row(OURS, 50.0, kind="overload", **figures) for figures in (light, heavy)]

    figures = overload_figures([a_row(OURS, 9.0, kind="closed"), *loads])

    assert bench_line("serving_overload", figures) == (
        "BENCH serving_overload: refused_p99_ms=30 kept_deadline=0.995 rss_flatness=n/a failed=1 lost=0"
    )
    (table,) = report.tables(loads)
    assert dict(zip(table.headings, table.lines[1], strict=True))["kept_deadline"] == "0.995"
    assert "rss_flatness" not in table.headings
    # without a search there is no picture
    assert fetched(report.page(loads, figures, RUN)) == []


def test_tables_have_the_results_by_mix_and_the_paired_ratios_with_their_spread():
    rows = rows_of_a_run()

    uniform, short, paired = report.tables(rows)

    result = dict(zip(uniform.headings, uniform.lines[1], strict=True))
    assert result["system"] == OURS
    assert (result["sustained"], result["p99_ms"]) == ("22", "200")
    # the median of the system's own loads, without the paired ones
    assert result["machine_gflops"] == "100"
    assert short.title.startswith("uniform 2-100 tokens")
    assert paired.lines == [
        [mix.label, TOKEN_BUDGET, "2", "0.849", "0.83-0.88", "1.179", "1.15-1.22"]
        for mix in (UNIFORM, SHORT)
    ]


def test_a_curve_has_the_loads_that_were_not_given_up_in_a_color_of_its_own():
    rows = [a_row(OURS, 20.0), a_row(OURS, 5.0), a_row(OURS, 30.0, not_sent=3)]
    rows.append(a_row(OURS, 52.0, kind="most", served=26.0, not_sent=9))
    rows += [a_row(OURS, 12.0, kind="paired"), a_row(OURS, 7.0, mix=SHORT)]

    expected = [(5.0, 5.0), (20.0, 20.0), (52.0, 26.0)]
    assert report.curve(rows, UNIFORM.label, OURS, "served") == expected
    assert set(report.COLORS) == set(SYSTEMS)
    assert len(set(report.COLORS.values())) == len(SYSTEMS)


def fetched(text):
    return re.findall(r'(?:src|srcset|href)="([^"]*)"', text)


def test_the_page_holds_everything_and_fetches_nothing():
    pytest.importorskip("matplotlib")
    rows = rows_of_a_run()
    rows.append(a_row(OURS, 11.0, served=10.9))
    rows.append(a_row(OURS, 11.0, kind="perf_analyzer", served=10.7, mean_ms=77.7))
    rows.append(Row("", "onnxruntime-fp32-dynamic", "failed", note="did not run on: <no> package"))
    rows.append(a_row(OURS, 52.0, kind="overload", refused_p99_ms=4.0, kept_deadline=1.0))

    text = report.page(rows, bench_figures(rows, [UNIFORM, SHORT]), RUN)

    prefix = "data:image/svg+xml;base64,"
    assert [link[: len(prefix)] for link in fetched(text)] == [prefix] * 2
    svg = base64.b64decode(fetched(text)[0].removeprefix(prefix)).decode()
    assert all(f"{mix.label} tokens: served/s" in svg for mix in (UNIFORM, SHORT))
    assert "url(" not in text
    cells = set(re.findall("<td>(.*?)</td>", text))
    assert {"sustained_vs_best_peer", "5.5", "perf_analyzer", "77.7", "220"} <= cells
    assert html.escape("a <fast> cpu") in text
    assert "did not run on: &lt;no&gt; package" in text
    # every load is there, once
    loads = [row for row in rows if row.kind not in {"result", "failed"}]
    assert len(re.findall(r"<td>uniform \d", text.split("every load")[1])) == len(loads)


def test_a_record_of_perf_analyzer_becomes_a_row_without_its_warm_up():
    # every half second a request that takes 100 ms, the last one 300 ms
    times = [(n * 500_000_000, 300_000_000 if n == 9 else 100_000_000) for n in range(10)]
    requests = [{"timestamp": at, "response_timestamps": [at + took]} for at, took in times]
    load = Load("load", UNIFORM, 4.0, seed=0, rate=2.0)

    row = perf_analyzer.analyzer_row({"experiments": [{"requests": requests[::-1]}]}, OURS, load)

    assert (row.kind, row.sent, row.ok, row.warmup) == ("perf_analyzer", 10, 10, 2)
    assert row.seconds == pytest.approx(3.5)
    assert row.served == pytest.approx(2.0)
    assert (row.p50_ms, row.p99_ms, row.mean_ms) == pytest.approx((100, 300, 125))
    assert (row.share, row.lost, row.lateness_p99_ms) == (None, None, None)


def test_perf_analyzer_gets_our_lengths_and_its_last_line_is_reported(monkeypatch):
    mix = named_mix("short", 512)
    sent = []

    def fails(command, *, cwd, **rest):
        sent.extend(json.loads((cwd / "requests.json").read_text())["data"])
        assert command[command.index("--request-count") + 1] == "15"
        return SimpleNamespace(returncode=99, stderr="error: no such model\n", stdout="")

    monkeypatch.setattr(perf_analyzer.subprocess, "run", fails)
    monkeypatch.setattr(perf_analyzer, "find_command", lambda name: name)
    load = Load("load", mix, 4.0, seed=0, rate=3.0)

    with pytest.raises(RuntimeError, match="error: no such model"):
        perf_analyzer.measure("127.0.0.1:1", OURS, load, load.token_ids(100))

    assert sorted(one["input_ids"]["shape"][0] for one in sent) == sorted(mix.take(15, 0))
