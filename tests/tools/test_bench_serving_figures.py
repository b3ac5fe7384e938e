"""The load lab's arithmetic: points of load, the search for what is sustained, metrics, the BENCH lines, the page."""

import asyncio
import html
import json
import random
import re
import threading
from collections import deque
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from varlen_bench.harness import rows as bench_report
from varlen_bench.harness.rows import Provenance
from varlen_bench.serving import draw, overload, page, perf, report, scrape
from varlen_bench.serving.arrivals import uniform_mix
from varlen_bench.serving.figures import GOAL, Point, percentile, point_of
from varlen_bench.serving.generator import Bounds, Offering, Sent, offer
from varlen_bench.serving.plan import most_outstanding, plan
from varlen_bench.serving.rows import Row, point_row
from varlen_bench.serving.run import Known, _is_hopeless
from varlen_bench.serving.scrape import Counted
from varlen_bench.serving.search import Search
from varlen_bench.serving.served import Load
from varlen_bench.serving.speed import gflops
from varlen_bench.serving.systems import DYNAMIC_BATCHER, OURS, SYSTEMS, TOKEN_BUDGET, system

from .virtual_clock import on_virtual_clock

UNIFORM, SHORT = "uniform 5-500", "uniform 2-100"
MIXES = [("uniform", UNIFORM), ("short", SHORT)]
RUN = Provenance("2026-01-01T00:00:00Z", "abc", "a <fast> cpu x2", 2, "python=3.11", "python -m x")


# percentiles and points


@pytest.mark.parametrize(
    "count, percent, rank", [(1, 99, 1), (99, 99, 99), (100, 99, 99), (200, 99, 198), (4, 50, 2)]
)
def test_a_percentile_is_one_of_the_values(count, percent, rank):
    values = random.Random(0).sample(range(1, count + 1), count)

    assert percentile(values, percent) == rank


def test_nothing_has_no_percentile():
    assert percentile([], 50) is None


def offering(*sent, not_sent=(), end=4.0):
    return Offering([Sent(n, *one) for n, one in enumerate(sent)], list(not_sent), end)


def test_a_point_counts_all_and_measures_what_comes_after_the_warm_up():
    found = offering(
        (0.5, 0.5, 3.5, "ok"),  # warms up; its answer is served in the measured seconds
        (1.0, 1.1, 1.2, "ok"),
        (2.0, 2.0, 2.4, "ok"),
        (2.5, 2.5, 2.51, "refused"),
        (3.0, 3.0, 3.9, "failed"),
        (3.5, 3.5, None, "unanswered"),
        (3.6, 3.6, 4.6, "ok"),  # too late to be served in them
        not_sent=[3.2],
    )

    point = point_of(found, rate=2.0, warmup=1.0, end=4.0, deadline=0.4)

    assert (point.sent, point.ok, point.refused, point.failed, point.lost) == (7, 4, 1, 1, 1)
    assert point.sent == point.ok + point.refused + point.failed + point.lost
    assert (point.warmup, point.not_sent) == (1, 1)
    assert point.served == pytest.approx(3 / 3)
    assert point.share == pytest.approx(3 / 7)
    assert point.seconds == 3.0
    assert (point.p50_ms, point.p99_ms) == pytest.approx((400, 1000))
    assert point.mean_ms == pytest.approx((200 + 400 + 1000) / 3)
    assert point.lateness_p99_ms == pytest.approx(100)
    assert point.refused_p99_ms == pytest.approx(10)
    # from when they were sent: 100, 400 and 1000 ms
    assert point.kept_deadline == pytest.approx(2 / 3)


def test_a_point_that_was_given_up_ends_there():
    found = offering(
        (1.0, 1.0, 1.1, "ok"), (2.0, 2.0, 3.0, "ok"), not_sent=[2.5, 3.0, 3.5], end=2.0
    )

    point = point_of(found, rate=2.0, warmup=1.0, end=4.0)

    assert point.seconds == 1.0
    assert point.served == pytest.approx(1.0)
    assert point.share == pytest.approx(2 / 5)
    assert not GOAL.is_met(point)


def test_requests_that_were_not_sent_in_between_do_not_end_a_point():
    found = offering((1.0, 1.0, 1.1, "ok"), (3.5, 3.5, 3.6, "ok"), not_sent=[2.5], end=3.5)

    assert point_of(found, rate=1.0, warmup=1.0, end=4.0).seconds == 3.0


def a_point(**changes):
    figures = dict.fromkeys(Point.__dataclass_fields__, 0)
    return Point(**(figures | {"share": 1.0, "p99_ms": 100.0} | changes))


@pytest.mark.parametrize(
    "changes, is_met",
    [
        ({}, True),
        ({"p99_ms": 500.0, "share": 0.98}, True),
        ({"p99_ms": 500.1}, False),
        ({"share": 0.979}, False),
        ({"lost": 1}, False),
        ({"p99_ms": None}, False),
    ],
)
def test_the_goal_is_a_quick_answer_to_nearly_all_and_some_answer_to_all(changes, is_met):
    assert GOAL.is_met(a_point(**changes)) == is_met


# the search


def searched(capacity, truth, steps):
    """Return what a search finds of a system that sustains all up to `truth`, and the rates that it tried."""
    search, tried = Search(capacity, steps), []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.record(rate, is_sustained=rate <= truth)
    return search.sustained, tried


@pytest.mark.parametrize("truth", [3.0, 5.0, 7.9, 9.5, 11.0, 14.0])
def test_the_search_closes_in_on_what_is_sustained(truth):
    few, many = searched(10.0, truth, 4)[0], searched(10.0, truth, 10)[0]

    assert few <= many <= truth
    assert few > 0.8 * truth
    assert many == pytest.approx(truth, rel=0.02)


def test_the_search_tries_no_more_than_it_may():
    assert [len(searched(10.0, 6.0, steps)[1]) for steps in (0, 1, 4)] == [0, 1, 4]
    assert searched(0.0, 6.0, 4)[1] == []


def test_a_light_load_is_known_and_no_step():
    search = Search(10.0, 2)

    search.record(3.0, is_sustained=True, is_step=False)

    assert search.sustained == 3.0
    assert search.next_rate() == 8.0
    search.record(8.0, is_sustained=False)
    assert search.next_rate() == pytest.approx(5.5)
    search.record(5.5, is_sustained=False)
    assert search.next_rate() is None
    assert search.sustained == 3.0


def test_a_load_that_passes_above_one_that_fails_does_not_count():
    search = Search(10.0, 3)
    for rate, is_sustained in ((9.0, True), (8.0, False), (6.0, True)):
        search.record(rate, is_sustained=is_sustained)

    assert search.sustained == 6.0


class OneByOne:
    """A server that takes 100 ms for a request and does one at a time."""

    free = 0.0

    async def send(self, number):
        loop = asyncio.get_running_loop()
        self.free = max(self.free, loop.time()) + 0.1
        await asyncio.sleep(self.free - loop.time())
        return "ok", ""


def test_the_generator_and_the_search_find_what_a_server_sustains():
    async def sustained():
        search = Search(10.0, 5)
        while (rate := search.next_rate()) is not None:
            dues = [n / rate for n in range(int(30 * rate))]
            bounds = Bounds(40, late_seconds=0.5, late_most=3)
            found = await offer(dues, OneByOne().send, bounds)
            point = point_of(found, rate=rate, warmup=1.0, end=30.0)
            search.record(rate, is_sustained=GOAL.is_met(point))
        return search.sustained

    assert on_virtual_clock(sustained()) == pytest.approx(10.0, rel=0.06)


def test_a_slow_system_is_looked_at_for_longer_and_holds_fewer_requests():
    effort = plan(8.0, quick=False).key

    assert effort.seconds_at(100.0) == 8.0
    assert effort.seconds_at(10.0) == 10.0
    assert effort.seconds_at(1.0) == 12.0
    assert (most_outstanding(1.0), most_outstanding(30.2)) == (16, 91)


def test_only_a_peer_that_cannot_be_the_best_is_looked_at_less():
    known = Known(saturated=40.0, best_peer=10.0)

    assert _is_hopeless(system("transformers-bf16-single"), 9.0, known)
    assert not _is_hopeless(system("transformers-bf16-single"), 11.0, known)
    assert not _is_hopeless(system(DYNAMIC_BATCHER), 9.0, known)
    assert not _is_hopeless(system(OURS), 9.0, known)


# metrics

PAGE = """# HELP varlen_tokens_total Tokens
varlen_requests_total{instance="m_0",model="m",outcome="ok"} 3
varlen_requests_total{instance="m_0",model="m",outcome="refused"} 2
varlen_requests_total{instance="n_0",model="n",outcome="ok"} 100
varlen_batch_sequences_bucket{model="m",le="1"} 1
varlen_batch_sequences_count{model="m"} 4
varlen_batch_sequences_sum{model="m"} 10
nv_inference_count{model="m",version="1"} 7
nv_cpu_memory_used_bytes 12
"""


def looked_at(monkeypatch, *pages):
    left = deque(pages)

    class Answer:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def read(self):
            return (left.popleft() if len(left) > 1 else left[0]).encode()

    monkeypatch.setattr(scrape.urllib.request, "urlopen", lambda url, timeout: Answer())


def test_a_models_series_are_summed_over_labels_and_without_buckets(monkeypatch):
    looked_at(monkeypatch, PAGE)

    assert scrape.model_metrics("url", "m") == {
        "varlen_requests_total": 5,
        "varlen_batch_sequences_count": 4,
        "varlen_batch_sequences_sum": 10,
        "nv_inference_count": 7,
    }


def test_metrics_are_waited_for_until_they_hold_what_was_answered(monkeypatch):
    later = PAGE.replace('outcome="ok"} 3', 'outcome="ok"} 9')
    looked_at(monkeypatch, PAGE, PAGE, later)

    after = scrape.metrics_after("url", "m", {"varlen_requests_total": 5}, 6)

    assert after["varlen_requests_total"] == 11


def test_ours_counts_padding_and_predictions():
    before = {"varlen_requests_total": 1.0, "varlen_tokens_total": 100.0}
    after = {
        "varlen_requests_total": 9.0,
        "varlen_batch_sequences_sum": 8.0,
        "varlen_batch_sequences_count": 2.0,
        "varlen_tokens_total": 400.0,
        "varlen_padding_tokens_total": 100.0,
        "varlen_batch_seconds_sum": 2.0,
        "varlen_batch_predicted_seconds_sum": 2.2,
        "nv_inference_count": 8.0,
        "nv_inference_exec_count": 8.0,
    }

    found = scrape.counted(before, after)

    assert (found.mean_batch, found.padding_share) == (4.0, 0.25)
    assert found.prediction_error == pytest.approx(0.1)


def test_a_peer_counts_its_batches_and_what_nobody_counts_is_not_there():
    peer = scrape.counted({}, {"nv_inference_count": 9.0, "nv_inference_exec_count": 3.0})
    older = scrape.counted({}, {"varlen_requests_total": 3.0, "varlen_tokens_total": 9.0})

    assert peer == Counted(mean_batch=3.0)
    assert older == Counted()
    assert scrape.counted({}, {}) == Counted()


# rows, the BENCH lines, the page


def a_row(name, kind, label=UNIFORM, **figures):
    return Row(label, name, kind, **figures)


def load_row(name, offered, *, kind="load", label=UNIFORM, **changes):
    figures = {"offered": offered, "seconds": 8.0, "sent": 80, "ok": 80, "served": offered}
    counts = dict.fromkeys(("warmup", "refused", "failed", "lost", "not_sent"), 0)
    latency = {"mean_ms": 50.0, "p50_ms": 40.0, "p99_ms": 200.0, "lateness_p99_ms": 2.0}
    return a_row(name, kind, label, **(figures | counts | latency | changes))


def rows_of_a_run():
    found = []
    for label, scale in ((UNIFORM, 1), (SHORT, 10)):
        for name, sustained, saturated in (
            (TOKEN_BUDGET, 20.0, 25.0),
            (OURS, 22.0, 26.0),
            ("varlen-dp-padded", 15.0, 24.0),
            ("varlen-fifo-padded", 8.0, 12.0),
            (DYNAMIC_BATCHER, 4.0, 6.0),
            ("onnxruntime-fp32-single", 11.0, 12.0),
        ):
            rate = scale * sustained
            found.append(load_row(name, 0.3 * rate, label=label, padding_share=0.0))
            found.append(load_row(name, rate, label=label, mean_ms=90.0, p99_ms=450.0))
            most = {"served": scale * saturated, "not_sent": 9, "p99_ms": 4000.0}
            found.append(load_row(name, scale * 52.0, kind="most", label=label, **most))
            result = {"sustained": rate, "saturated": scale * saturated, "cosine_min": 0.99999}
            found.append(a_row(name, "result", label, rss_mib=400.0, **result))
        for turn, faster in ((0, 0.8), (1, 0.9)):
            for name, ratio in ((TOKEN_BUDGET, 1.0), (OURS, faster)):
                latency = {"mean_ms": 100.0 * ratio, "p99_ms": 300.0 / ratio}
                found.append(load_row(name, 12.0, kind="paired", label=label, turn=turn, **latency))
    return found


def test_two_policies_are_compared_load_by_load_with_spread():
    rows = rows_of_a_run()

    assert report.paired_ratios([row for row in rows if row.lengths == SHORT], "mean_ms") == [
        pytest.approx(0.8),
        pytest.approx(0.9),
    ]
    assert report.paired_summary(rows) == [
        [label, "2", "0.849", "0.83-0.88", "1.179", "1.15-1.22"] for label in (UNIFORM, SHORT)
    ]
    assert report.paired_table(rows).row_count == 2


def test_the_bench_line_holds_the_keys_in_order():
    figures = report.bench_figures(rows_of_a_run(), MIXES)

    line = bench_report.bench_line("serving", figures)

    assert line == (
        "BENCH serving: sustained_vs_dynamic_batcher=5.5 sustained_vs_best_peer=2 "
        "dp_padded_vs_fifo_padded=2 dp_mean_vs_token_budget=0.8485 dp_p99_vs_token_budget=1.1785 lost=0 "
        "short_sustained_vs_dynamic_batcher=5.5 short_sustained_vs_best_peer=2 "
        "short_dp_padded_vs_fifo_padded=2 short_dp_mean_vs_token_budget=0.8485 "
        "short_dp_p99_vs_token_budget=1.1785"
    )


def test_what_did_not_run_has_no_figure_and_what_was_lost_counts_everywhere():
    rows = [
        row for row in rows_of_a_run() if row.system != DYNAMIC_BATCHER and row.kind != "paired"
    ]
    rows.append(load_row("varlen-none", 3.0, label=SHORT, lost=2))

    figures = report.bench_figures(rows, MIXES[:1])

    assert figures["sustained_vs_dynamic_batcher"] is None
    assert figures["dp_mean_vs_token_budget"] is None
    assert figures["sustained_vs_best_peer"] == 2.0
    assert figures["lost"] == 2


def test_a_trace_alone_has_its_name_before_its_keys():
    figures = report.bench_figures([], [("trace", "trace azure / 8")])

    assert next(iter(figures)) == "trace_sustained_vs_dynamic_batcher"
    assert figures["lost"] == 0


def test_the_worst_of_every_overload_is_told():
    loads = [
        load_row(OURS, 50.0, kind="overload", refused_p99_ms=9.0, kept_deadline=1.0, refused=40),
        load_row(OURS, 500.0, kind="overload", refused_p99_ms=30.0, kept_deadline=0.995, failed=1),
    ]

    assert report.overload_figures([load_row(OURS, 9.0, kind="closed"), *loads]) == {
        "refused_p99_ms": 30.0,
        "kept_deadline": 0.995,
        "rss_flatness": None,
        "failed": 1,
        "lost": 0,
    }
    assert "99.50% of them in time" in report.overload_lines(loads)[1]


def test_a_row_has_the_points_figures_and_what_the_system_counted():
    point = a_point(offered=4.0, ok=7, p50_ms=1.5)

    found = Counted(2.0, 0.1, -0.2)
    row = point_row(UNIFORM, OURS, "load", point, found=found, rss=3 << 20, speed=99.0, note="x")

    assert (row.offered, row.ok, row.p50_ms, row.p99_ms) == (4.0, 7, 1.5, 100.0)
    assert (row.mean_batch, row.padding_share, row.prediction_error) == (2.0, 0.1, -0.2)
    assert (row.rss_mib, row.machine_gflops, row.note) == (3.0, 99.0, "x")


def test_the_table_says_how_fast_the_machine_was_in_a_systems_turn():
    rows = [
        load_row(OURS, rate, machine_gflops=speed)
        for rate, speed in ((5.0, 90.0), (9.0, 160.0), (12.0, 100.0))
    ]
    rows += [load_row(TOKEN_BUDGET, 5.0, machine_gflops=10.0), a_row(OURS, "result")]

    assert report.result_cells(rows, rows[-1])[2] == "100"
    assert gflops() > 0


def test_a_curve_has_the_loads_that_went_to_their_end():
    rows = [
        load_row(OURS, 20.0),
        load_row(OURS, 5.0),
        load_row(OURS, 30.0, not_sent=3),
        load_row(OURS, 52.0, kind="most", served=26.0, not_sent=9),
        load_row(OURS, 12.0, kind="paired"),
        load_row(OURS, 7.0, label=SHORT),
    ]

    assert draw.curve(rows, UNIFORM, OURS, "served") == [(5.0, 5.0), (20.0, 20.0), (52.0, 26.0)]


def test_every_system_has_a_colour_of_its_own():
    assert {one.name for one in SYSTEMS} == set(draw._COLOURS)
    assert len(set(draw._COLOURS.values())) == len(SYSTEMS)


def test_the_picture_is_a_png_with_a_row_for_each_mix():
    pytest.importorskip("matplotlib")

    one, two = (
        draw.picture(
            rows_of_a_run(),
            labels,
        )
        for labels in ([UNIFORM], [UNIFORM, SHORT])
    )

    assert one.startswith(b"\x89PNG")
    heights = [int.from_bytes(png[20:24], "big") for png in (one, two)]
    assert heights[1] > 1.5 * heights[0]


class _Page(HTMLParser):
    """Text of cells, and what a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.cells = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.fetched += [given[name] for name in ("src", "href") if name in given]
        if tag not in {"meta", "img"}:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if "td" in self.open:
            self.cells[-1] += text


def test_the_page_holds_everything_and_fetches_nothing():
    rows = rows_of_a_run()
    rows.append(load_row(OURS, 11.0, served=10.9))
    rows.append(load_row(OURS, 11.0, kind="perf_analyzer", served=10.7, mean_ms=77.7))
    rows.append(
        a_row("onnxruntime-fp32-dynamic", "failed", "", note="did not run on: <no> package")
    )
    rows.append(load_row(OURS, 52.0, kind="overload", refused_p99_ms=4.0, kept_deadline=1.0))
    figures = report.bench_figures(rows, MIXES)

    text = page.render(rows, labels=[UNIFORM, SHORT], figures=figures, png=b"png", run=RUN)

    parsed = _Page(text)
    assert parsed.open == []
    assert parsed.fetched == ["data:image/png;base64,cG5n"]
    assert "url(" not in text
    assert {"sustained_vs_best_peer", "5.5", "perf_analyzer", "77.7", "220.0"} <= set(parsed.cells)
    assert html.escape("a <fast> cpu") in text
    assert "did not run on: &lt;no&gt; package" in text
    assert "52.0 requests/s for 8 s" in text
    # every load is there, once
    loads = [row for row in rows if row.kind not in {"result", "failed"}]
    assert len(re.findall(r"<tr><td>uniform", text.split("every load")[1])) == len(loads)


def test_a_page_without_loads_has_no_picture():
    text = page.render([], labels=[UNIFORM], figures={"lost": 0, "x": None}, png=None, run=RUN)

    assert _Page(text).fetched == []
    assert "n/a" in _Page(text).cells


# perf_analyzer and memory


def test_a_record_of_perf_analyzer_becomes_a_row_without_its_warm_up():
    second = 1_000_000_000
    # every half second one that takes 100 ms, the last one 300 ms
    requests = [
        {"timestamp": n * second // 2, "response_timestamps": [n * second // 2 + second // 10]}
        for n in range(10)
    ]
    requests[-1]["response_timestamps"] = [requests[-1]["timestamp"] + 3 * second // 10]
    load = Load(uniform_mix("uniform", 512), 2.0, 4.0, seed=0, outstanding=9)

    row = perf.analyzer_row({"experiments": [{"requests": requests[::-1]}]}, OURS, load)

    assert (row.sent, row.ok, row.warmup) == (10, 10, 2)
    assert row.seconds == pytest.approx(3.5)
    assert row.served == pytest.approx(2.0)
    assert (row.p50_ms, row.p99_ms) == pytest.approx((100, 300))
    assert row.mean_ms == pytest.approx(125)


def test_perf_analyzer_gets_our_lengths_and_its_last_words_are_told(monkeypatch, tmp_path):
    load = Load(uniform_mix("short", 512), 3.0, 4.0, seed=0, outstanding=9)
    sent = []

    def fails(command, *, cwd, **rest):
        sent.extend(json.loads((cwd / "requests.json").read_text())["data"])
        assert command[command.index("--request-count") + 1] == "15"
        return SimpleNamespace(returncode=99, stderr="error: no such model\n", stdout="")

    monkeypatch.setattr(perf.subprocess, "run", fails)
    monkeypatch.setattr(perf, "find_command", lambda name: name)

    with pytest.raises(perf.AnalyzerError, match="error: no such model"):
        perf.cross_check("127.0.0.1:1", OURS, load, 100)

    assert sorted(one["input_ids"]["shape"][0] for one in sent) == sorted(load.mix.take(15, 0))


def test_memory_is_flat_after_its_first_tenth(monkeypatch):
    seen = deque([50, *range(100, 109), *[104] * 100])
    enough = threading.Event()

    def resident(pid):
        if len(seen) < 95:
            enough.set()
            raise OSError("gone")
        return seen.popleft()

    monkeypatch.setattr(overload, "resident_bytes", resident)
    monkeypatch.setattr(overload, "_LOOK_SECONDS", 0.001)

    with overload.ResidentLooks(1) as looks:
        assert enough.wait(20)

    assert len(looks.samples) == 16
    assert looks.flatness() == pytest.approx(8 / 104)
    assert overload.ResidentLooks(1).flatness() is None
