"""A server that is about to stop refuses probes first, then every new request."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.backend.requests import request_of, text
from varlen.errors import DrainingError, RequestError
from varlen.request.generation import GenerationOptions
from varlen.request.request import RequestOptions, check_probe
from varlen.server import draining
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
NOBODY = 65534


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
    assert not list(marker.parent.iterdir())


def test_a_watch_reads_the_file_again_after_a_tenth_of_a_second(marker):
    now = 100.0
    watch = DrainWatch(marker, lambda: now)
    assert watch.state == "serving"
    write_state(marker, "draining")

    now += 0.05
    assert watch.state == "serving"
    now += 0.1
    assert watch.state == "draining"


@pytest.mark.parametrize("name", ["", ".", ".drain", ".serving.0", ".refused.0", "0.refusing.0"])
def test_a_file_of_another_name_marks_nothing(marker, name):
    marker.with_name(f"{marker.name}{name}").write_text("refusing")

    assert read_state(marker) == "serving"


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_what_is_no_file_of_its_own_marks_nothing(marker, kind, tmp_path):
    target, path = tmp_path / "elsewhere", marker.with_name(f"{marker.name}.refusing.0")
    target.touch()
    if kind == "link":
        path.symlink_to(target)
    elif kind == "hard link":
        path.hardlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()

    assert read_state(marker) == "serving"


def test_files_of_another_user_are_ignored_and_stop_no_drain(marker, monkeypatch):
    """A user who made the file first stopped a drain."""
    user = os.geteuid()
    for state in ("draining", "refusing"):
        write_state(marker, state)
        (path,) = marker.parent.iterdir()
        path.rename(marker.with_name(f"{marker.name}.{state}.theirs"))
    marker.write_text("refusing")
    theirs = sorted(marker.parent.iterdir())
    if user == 0:
        for path in theirs:
            os.chown(path, NOBODY, NOBODY)
    else:
        # the files seem to be of another user
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert read_state(marker) == "serving"
    if user:
        return

    write_state(marker, "refusing")
    assert read_state(marker) == "refusing"
    write_state(marker, "serving")
    assert read_state(marker) == "serving"
    assert sorted(marker.parent.iterdir()) == theirs


def test_a_folder_full_of_files_takes_a_twentieth_of_the_time(marker, monkeypatch):
    now, reads = 100.0, []

    def read(_):
        nonlocal now
        reads.append(now)
        now += 2.0
        return "serving"

    monkeypatch.setattr(draining, "read_state", read)
    watch = DrainWatch(marker, lambda: now)
    for _ in range(100):
        assert watch.state == "serving"
        now += 1.0

    assert len(reads) == 3


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

    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f"{marker.name}.draining.")
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
