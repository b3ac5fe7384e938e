"""Metrics: a thread exports each count to the server's series once."""

from time import monotonic, sleep

import pytest

from tests.backend.fakes.triton_python_backend_utils import Metric
from tests.metric_names import LABELS, SERIES
from tests.threads import run_in_threads
from varlen.telemetry import metrics
from varlen.telemetry.metrics import METRICS, Drained, Exporter, SnapshotMetric, Stats

INSTANCE = {"model": "m", "version": "1", "instance": "m_0"}
REQUESTS = "varlen_requests_total"
REFUSALS = "varlen_refused_requests_total"
# arbitrary, distinct numbers
GAUGES = {
    name: float(value)
    for value, name in enumerate((n for n in SERIES if SERIES[n] == "GAUGE"), start=3)
}
TOTALS = {
    "varlen_plan_seconds_total": 0.5,
    "varlen_plan_cache_hits_total": 7,
    "varlen_plan_cache_misses_total": 2,
    "varlen_response_cache_hits_total": 11,
    "varlen_response_cache_joined_total": 12,
    "varlen_response_cache_misses_total": 13,
    "varlen_response_cache_evictions_total": 14,
    "varlen_prefill_tokens_total": 15,
    "varlen_decode_tokens_total": 16,
    "varlen_preemptions_total": 17,
    "varlen_prefix_cache_hit_tokens_total": 18,
    "varlen_order_preemptions_total": 19,
    "varlen_draft_tokens_total": 20,
    "varlen_draft_tokens_accepted_total": 21,
}
SNAPSHOT = {**GAUGES, **TOTALS}


class FakeServer:
    """Creates series, and finds them by name and by outcome or reason."""

    def __init__(self):
        self.series = {}
        self.kinds = {}

    def make_series(self, metric, labels):
        assert metric.description
        key = (metric.value, labels.get("outcome", labels.get("reason")))
        assert key not in self.series
        assert {k: v for k, v in labels.items() if k not in ("outcome", "reason")} == INSTANCE
        self.kinds[metric.value] = metric.kind
        self.series[key] = Metric(labels, metric.buckets)
        return self.series[key]

    def __getitem__(self, key):
        return self.series[key if isinstance(key, tuple) else (key, None)]


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def stats():
    return Stats()


@pytest.fixture
def exporter(server, stats, monkeypatch):
    # tests call flush themselves
    monkeypatch.setattr(metrics, "_FLUSH_SECONDS", 3600)
    exporter = Exporter(stats, SNAPSHOT.copy, server.make_series, INSTANCE)
    yield exporter
    exporter.close()


def test_every_series_shows_from_the_start(server, exporter):
    assert server.kinds == SERIES
    for name in SERIES:
        labels = {label for each, label in server.series if each == name}
        assert labels == set(LABELS.get(name, [None]))


def test_buckets_ascend_and_only_histograms_have_them(server, exporter):
    for (name, _), metric in server.series.items():
        kind, buckets = server.kinds[name], metric.buckets
        assert (buckets is not None) == (kind == "HISTOGRAM")
        assert buckets is None or (buckets == sorted(set(buckets)) and len(buckets) > 5)


def test_a_flush_carries_everything_over_once(server, stats, exporter):
    stats.count_request("ok", 0.5)
    stats.count_request("ok", 0.25)
    stats.count_request("invalid", 0.125)
    stats.count_batch(3, 40, 5)
    stats.count_batch(1, 2, 0)
    stats.count_batch_seconds(predicted=0.5, actual=0.25)
    stats.count_refusal("deadline")
    stats.count_start(0.125, [0.0625])
    stats.count("varlen_split_batches_total")

    exporter.flush()
    exporter.flush()

    assert server[REQUESTS, "ok"].value == 2
    assert server[REQUESTS, "invalid"].value == 1
    assert server[REQUESTS, "failed"].value == 0
    assert server["varlen_sequences_total"].value == 4
    assert server["varlen_tokens_total"].value == 42
    assert server["varlen_padding_tokens_total"].value == 5
    assert server["varlen_scheduling_seconds_total"].value == 0.125
    assert server["varlen_batch_predicted_seconds"].observed == [0.5]
    assert server["varlen_batch_seconds"].observed == [0.25]
    assert server[REFUSALS, "deadline"].value == 1
    assert server[REFUSALS, "expired"].value == 0
    assert server["varlen_split_batches_total"].value == 1
    assert server["varlen_request_latency_seconds"].observed == [0.5, 0.25, 0.125]
    assert server["varlen_queue_wait_seconds"].observed == [0.0625]
    assert server["varlen_batch_sequences"].observed == [3, 1]
    assert server["varlen_batch_tokens"].observed == [40, 2]


def test_gauges_show_what_is_read_now(server, exporter):
    exporter.flush()

    assert {name: server[name].value for name in GAUGES} == GAUGES


def test_totals_are_exported_as_they_grow(server, stats, monkeypatch):
    monkeypatch.setattr(metrics, "_FLUSH_SECONDS", 3600)
    snapshot = dict(SNAPSHOT)
    exporter = Exporter(stats, snapshot.copy, server.make_series, INSTANCE)

    exporter.flush()
    exporter.flush()
    snapshot["varlen_plan_cache_hits_total"] += 5
    exporter.flush()
    exporter.close()

    assert server["varlen_plan_cache_hits_total"].value == 12
    assert server["varlen_plan_cache_misses_total"].value == 2
    assert server["varlen_plan_seconds_total"].value == 0.5


def test_each_adapter_of_the_model_has_series_and_only_changes_are_exported(stats, monkeypatch):
    monkeypatch.setattr(metrics, "_FLUSH_SECONDS", 3600)
    made, calls = [], []

    class Series:
        def __init__(self, *key):
            self.key = key
            made.append(key)

        def increment(self, value):
            calls.append((*self.key, value))

        set = observe = increment

    def make_series(metric, labels):
        return Series(metric.value, labels.get("adapter"))

    snapshot = {(SnapshotMetric.ADAPTER_BYTES, "a"): 8.0, (SnapshotMetric.ADAPTER_LOADS, "b"): 2.0}
    exporter = Exporter(stats, snapshot.copy, make_series, INSTANCE, ["a", "b"])
    stats.count_adapter("b")
    exporter.flush()
    exporter.flush()
    exporter.close()

    names = {name for name, adapter in made if adapter}
    assert names == {metric.value for metric in METRICS if metric.label == "adapter"}
    assert len(names) == 4
    assert {(name, adapter) for name in names for adapter in "ab"} <= {*made}
    assert calls == [
        ("varlen_adapter_requests_total", "b", 1),
        ("varlen_adapter_loads_total", "b", 2.0),
        ("varlen_adapter_resident_bytes", "a", 8.0),
    ]


def test_the_thread_flushes_and_outlives_a_failure(server, stats, monkeypatch):
    monkeypatch.setattr(metrics, "_FLUSH_SECONDS", 0.005)
    exporter = Exporter(stats, SNAPSHOT.copy, server.make_series, INSTANCE)
    server[REQUESTS, "failed"].increment = lambda value: 1 // 0
    stats.count_request("failed", 0.5)
    sleep(0.05)

    stats.count_request("ok", 0.5)

    until = monotonic() + 10
    while server[REQUESTS, "ok"].value != 1 and monotonic() < until:
        sleep(0.005)
    exporter.close()
    assert server[REQUESTS, "ok"].value == 1


def test_counts_from_many_threads_are_all_kept(stats):
    def count(index):
        for _ in range(500):
            stats.count_request("ok", 0.0)
            stats.count_batch(2, 3, 1)

    run_in_threads(4, count)

    drained = stats.drain()
    outcomes = {key: count for key, count in drained.counts.items() if isinstance(key, tuple)}
    assert outcomes == {("varlen_requests_total", "ok"): 2000}
    assert drained.counts["varlen_sequences_total"] == 4000
    assert drained.counts["varlen_tokens_total"] == 6000
    assert len(drained.observed["varlen_batch_tokens"]) == 2000


def test_a_drain_empties(stats):
    stats.count_start(0.0, [1.0])
    stats.drain()

    assert stats.drain() == Drained({}, {})


def test_a_server_without_metrics_stops_the_exporter_at_once(stats):
    def refuse(*_):
        raise RuntimeError("metrics not supported")

    with pytest.raises(RuntimeError, match="not supported"):
        Exporter(stats, SNAPSHOT.copy, refuse, INSTANCE)


def test_without_a_drain_the_oldest_observations_are_dropped(monkeypatch):
    monkeypatch.setattr(metrics, "_MOST_OBSERVATIONS", 3)
    stats = Stats()

    for seconds in range(5):
        stats.count_start(0.0, [float(seconds)])

    assert list(stats.drain().observed["varlen_queue_wait_seconds"]) == [2.0, 3.0, 4.0]
