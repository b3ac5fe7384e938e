"""A server that is about to stop refuses probes first, then every new request."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.backend.requests import request_of, text
from varlen.errors import DrainingError, RequestError
from varlen.request.generation import GenerationOptions
from varlen.request.probe import check_probe
from varlen.request.request import RequestOptions
from varlen.server.draining import (
    DrainWatch,
    marker_of,
    read_state,
    remove_stale_markers,
    write_state,
)
from varlen.telemetry.metrics import SnapshotMetric

PROBE = {"probe": True}
SECONDS = 20.0


@pytest.fixture
def marker(tmp_path):
    """The file of this process, in a folder of the test."""
    found = marker_of(os.getpid(), tmp_path)
    assert found is not None
    return found


def test_a_server_without_a_file_serves(marker):
    assert read_state(marker) == "serving"
    DrainWatch(marker).check(is_probe=True)


def test_probes_are_refused_before_all_else(marker):
    write_state(marker, "draining")
    DrainWatch(marker).check(is_probe=False)
    with pytest.raises(DrainingError, match="send the request to another one"):
        DrainWatch(marker).check(is_probe=True)

    write_state(marker, "refusing")
    for is_probe in (True, False):
        with pytest.raises(DrainingError):
            DrainWatch(marker).check(is_probe=is_probe)

    write_state(marker, "serving")
    assert not marker.exists()


def test_a_watch_reads_the_file_again_after_a_tenth_of_a_second(marker):
    now = 100.0
    watch = DrainWatch(marker, lambda: now)
    assert watch.state == "serving"
    write_state(marker, "draining")

    now += 0.05
    assert watch.state == "serving"
    now += 0.1
    assert watch.state == "draining"


@pytest.mark.parametrize("content", [b"", b"drain", b"\xff\xfe", b"x" * 10_000], ids=len)
def test_a_file_of_anything_else_marks_nothing(marker, content):
    marker.write_bytes(content)

    assert read_state(marker) == "serving"


def test_a_link_or_a_pipe_marks_nothing(marker, tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text("refusing")
    marker.symlink_to(target)
    assert read_state(marker) == "serving"

    marker.unlink()
    os.mkfifo(marker)
    assert read_state(marker) == "serving"


def test_files_of_servers_that_have_ended_are_removed(marker, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = marker_of(child.pid, tmp_path)
    child.communicate(b"\n")
    assert ended is not None
    for path in (marker, ended):
        write_state(path, "draining")
    # the id was used again by a process that started later
    reused = marker.with_name(f"{marker.name}0")
    write_state(reused, "draining")

    remove_stale_markers(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == [marker.name]
    assert marker_of(child.pid, tmp_path) is None


def answer(model, request):
    model.execute([request])
    assert request.answered.wait(SECONDS)
    return request.response.error()


def test_a_loaded_model_drains_and_counts_its_requests(load, ask, pb_utils, marker):
    model = load()
    model._drain = DrainWatch(marker)
    few = text("a")

    assert answer(model, ask(PROBE, text=few)) is None
    write_state(marker, "draining")
    model._drain = DrainWatch(marker)
    assert not model.is_ready()
    assert answer(model, ask(PROBE, text=few)).code() == pb_utils.TritonError.UNAVAILABLE
    assert answer(model, ask(text=few)) is None

    write_state(marker, "refusing")
    model._drain = DrainWatch(marker)
    error = answer(model, ask(text=few))
    assert error.code() == pb_utils.TritonError.UNAVAILABLE
    assert "shutting down" in error.message()

    values = model._snapshot()
    assert values[SnapshotMetric.DRAINING] == 2
    assert values[SnapshotMetric.OPEN_REQUESTS] == 0


def test_a_probe_passes_the_response_cache(load, ask):
    model = load(response_cache_bytes="1000000")
    for _ in range(2):
        assert answer(model, ask(PROBE, text=text("a"))) is None
        assert answer(model, ask(text=text("a"))) is None

    values = model._snapshot()
    assert values[SnapshotMetric.CACHE_MISSES] == 1
    assert values[SnapshotMetric.CACHE_HITS] == 1


def test_a_probe_has_one_row(load, ask):
    error = answer(load(), ask(PROBE, text=text("a", "b")))

    assert "the probe has 2 rows" in error.message()
    assert "send one row of at most 256 tokens" in error.message()


@pytest.mark.parametrize(
    "request_",
    [
        request_of([1] * 257, probe=True),
        request_of([1], probe=True, generation=GenerationOptions(max_tokens=5)),
    ],
    ids=["prompt", "answer"],
)
def test_a_probe_is_tiny(request_):
    with pytest.raises(RequestError, match="the probe has"):
        check_probe(request_)
    check_probe(replace(request_, options=RequestOptions()))
