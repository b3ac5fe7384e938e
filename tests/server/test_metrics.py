"""The backend's series on /metrics: names, labels, and values after known traffic."""

import re
import urllib.request

import numpy as np
import pytest

from tests.metric_names import LABELS, SERIES

from .clients import AnswerError, integers
from .serving import add_model, load, metrics, outcomes, unload, wait_until_idle


def test_every_series_shows_from_the_start_with_type_and_help(server):
    series = metrics(server, "tagger")
    with urllib.request.urlopen(server.metrics_url) as response:
        page = response.read().decode()

    for name, kind in SERIES.items():
        parts = [f"{name}_count", f"{name}_sum"] if kind == "HISTOGRAM" else [name]
        labelled = [f"{name} {label}" for label in LABELS.get(name, ())]
        assert set(labelled or parts) <= series.keys(), name
        assert f"# TYPE {name} {kind.lower()}\n" in page
        assert re.search(rf"# HELP {name} \w", page)


@pytest.mark.full
def test_versions_of_one_model_have_series_of_their_own(server, checkpoints):
    folder = server.model_repository
    add_model(folder, "versions", checkpoints["encoder"], text="version_policy { all { } }")
    (folder / "versions" / "2").symlink_to(checkpoints["encoder"], target_is_directory=True)
    assert load(server, "versions") is None

    try:
        with urllib.request.urlopen(server.metrics_url) as response:
            page = response.read().decode()
        labels = re.findall(r'varlen_weight_bytes\{(.*model="versions".*)\}', page)
        found = sorted(re.findall(r'version="(\d+)"', " ".join(labels)))
        assert found == ["1", "2"]
        for version in found:
            assert f"varlen: versions v{version}: serving embed" in server.log()
    finally:
        unload(server, "versions")


def test_what_is_counted_is_what_was_sent(server, grpc_client):
    lengths = [1, 7, 30, 30, 512]
    outcomes(server, "tagger")
    before = metrics(server, "tagger")

    for length in lengths:
        grpc_client.infer("tagger", {"input_ids": integers(np.full((2, length), 9))})
    for _ in range(3):
        with pytest.raises(AnswerError):
            grpc_client.infer("tagger", {"input_ids": integers([[-1]])})

    outcomes(server, "tagger")
    wait_until_idle(server, "tagger")
    after = metrics(server, "tagger")
    grown = {name: after[name] - before[name] for name in after if name in before}
    assert grown["varlen_requests_total ok"] == len(lengths)
    assert grown["varlen_requests_total invalid"] == 3
    assert (
        grown["varlen_sequences_total"] == grown["varlen_batch_sequences_sum"] == 2 * len(lengths)
    )
    assert grown["varlen_tokens_total"] == grown["varlen_batch_tokens_sum"] == 2 * sum(lengths)
    # each request was answered before the next was sent, and its two rows ran in one batch or in two
    batches = grown["varlen_batch_sequences_count"]
    assert batches == grown["varlen_batch_tokens_count"]
    assert len(lengths) <= batches <= 2 * len(lengths)
    assert grown["varlen_queue_wait_seconds_count"] == len(lengths)
    assert grown["varlen_request_latency_seconds_count"] == len(lengths) + 3
    assert grown["varlen_request_latency_seconds_sum"] > grown["varlen_queue_wait_seconds_sum"] > 0
    # batches of one shape have one plan
    plans = grown["varlen_plan_cache_hits_total"] + grown["varlen_plan_cache_misses_total"]
    assert plans == batches
    assert grown["varlen_plan_cache_hits_total"] >= 1
    assert grown["varlen_split_batches_total"] == 0
    assert after["varlen_arena_chunks"] == 1
    assert (
        0
        < after["varlen_arena_peak_live_bytes"]
        <= after["varlen_arena_footprint_bytes"]
        <= after["varlen_arena_reserved_bytes"]
        <= after["varlen_arena_capacity_bytes"]
    )
    assert after["varlen_weight_bytes"] > 0
