"""Reading the metrics page."""

import pytest

from varlen_client.metrics import (
    MetricsSample,
    fetch_metrics,
    model_series,
    pages_by_model,
    rates,
    read_metrics,
)

PAGE = """\
# HELP varlen_queued_requests Requests that wait
# TYPE varlen_queued_requests gauge
varlen_queued_requests{model="minilm",instance="minilm_0_0"} 2
varlen_queued_requests{model="minilm",version="2",instance="minilm_0_1"} 3
varlen_queued_requests{model="other",instance="other_0_0"} 100
varlen_queued_tokens{instance="minilm_0_0",model="minilm"} 5e+02
varlen_requests_total{model="minilm",instance="minilm_0_0",outcome="ok"} 10
varlen_requests_total{model="minilm",instance="minilm_0_0",outcome="refused"} 4
varlen_sequences_total{model="minilm",instance="minilm_0_0"} 20
varlen_tokens_total{model="minilm",instance="minilm_0_0"} 900
varlen_batch_seconds_bucket{model="minilm",instance="minilm_0_0",le="0.1"} 3
varlen_batch_seconds_bucket{model="minilm",instance="minilm_0_0",le="+Inf"} 6
varlen_batch_seconds_sum{model="minilm",instance="minilm_0_0"} 1.5
varlen_batch_seconds_count{model="minilm",instance="minilm_0_0"} 6
nv_inference_count{model="minilm",version="1"} 7
nv_inference_count{model="minilm",version="2"} 1
nv_cpu_utilization 0.5
"""


def test_sums_each_metric_of_one_model_without_histogram_buckets():
    assert model_series(PAGE, "minilm") == {
        "varlen_queued_requests": 5,
        "varlen_queued_tokens": 500,
        "varlen_requests_total": 14,
        "varlen_sequences_total": 20,
        "varlen_tokens_total": 900,
        "varlen_batch_seconds_sum": 1.5,
        "varlen_batch_seconds_count": 6,
        "nv_inference_count": 8,
    }


def test_the_lines_of_a_model_are_all_that_is_read_of_it():
    pages = pages_by_model(PAGE)

    assert pages.keys() == {"minilm", "other"}
    for model, page in pages.items():
        assert model_series(page, model) == model_series(PAGE, model)
        assert pages_by_model(page).keys() == {model}


def test_a_page_without_the_model_has_no_series():
    assert model_series(PAGE, "nope") == {}


def test_a_page_with_only_the_servers_own_series_is_no_sample():
    assert read_metrics('nv_inference_count{model="minilm",version="1"} 7\n', "minilm") is None


def test_sums_the_instances_of_one_model():
    sample = read_metrics(PAGE, "minilm")

    assert sample is not None
    assert (sample.queued_requests, sample.queued_tokens) == (5, 500)
    assert sample.requests == {"ok": 10, "refused": 4}
    assert sample.tokens == 900


def test_a_page_without_the_model_is_no_sample():
    assert read_metrics(PAGE, "nope") is None


def test_rates_are_per_second_also_after_a_counter_reset():
    before = MetricsSample(10.0, 0, 0, {"ok": 10}, 1000)
    after = MetricsSample(12.0, 0, 0, {"ok": 14, "refused": 2}, 60)

    rate = rates(before, after)

    assert rate.requests == pytest.approx(3)
    assert rate.tokens == pytest.approx(30)  # the counter was reset


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/metrics", "nonsense"])
def test_no_response_is_no_metrics_page(url):
    assert fetch_metrics(url, timeout=1.0) is None
