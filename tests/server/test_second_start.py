"""A second start reads costs from the cache; a damaged cache is no error."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from varlen.costs.store import CostStore
from varlen_tools.local_server import LocalServer

from .clients import GrpcClient, texts
from .serving import add_model

pytestmark = pytest.mark.full

MEASURED = r"costs measured in (\d+\.\d) s \((\d+) batches"
READ = r"costs read from the cache, measured \d{4}-\d\d-\d\d \d\d:\d\d UTC"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path, cache, checkpoints):
    """A repository whose only model measures costs, and stores them in `cache`."""
    add_model(
        tmp_path / "models",
        "encoder",
        checkpoints["encoder"],
        warmup_seconds="60",
        cache_folder=str(cache),
        max_batch_sequences="8",
        max_batch_tokens="128",
    )
    return tmp_path / "models"


@contextmanager
def started(repository: Path) -> Iterator[LocalServer]:
    """Start a server and check that it answers."""
    with LocalServer(repository) as server:
        server.wait_ready()
        with GrpcClient(server) as client:
            assert len(client.infer("encoder", texts("word1 word2"))) == 1
        yield server


def test_the_first_start_measures_the_second_reads_and_a_damaged_entry_is_measured_again(
    repository, cache
):
    with started(repository) as server:
        first = server.log()
    (kept,) = CostStore(cache).entries()

    with started(repository) as server:
        second = server.log()

    measured = re.search(MEASURED, first)
    assert measured, first
    assert int(measured[2]) == len(kept.measurement.batches)
    assert re.search(r"measured \d+ of \d+ batches, \d+\.\d s of at most 60", first)
    assert "costs read" not in first
    assert re.search(READ, second), second
    assert "batches, " not in second
    assert "costs measured" not in second
    assert CostStore(cache).entries() == [kept]

    (file,) = cache.glob("costs_*.json")
    file.write_bytes(file.read_bytes()[:-50])

    with started(repository) as server:
        log = server.log()

    assert re.search(MEASURED, log), log
    assert f"has a damaged entry {file.name}" in log
    (measured_again,) = CostStore(cache).entries()
    assert measured_again.key == kept.key


def test_a_server_runs_without_a_cache_that_cannot_be_written(repository, cache):
    cache.write_text("a file where a folder should be")

    with started(repository) as server:
        log = server.log()

    assert re.search(MEASURED, log), log
    # the engine says so, and the process that loads the model
    assert log.count("the cost cache") <= 2
    assert cache.read_text() == "a file where a folder should be"


def test_models_that_load_at_once_share_one_cache(repository, cache, checkpoints):
    settings = {"warmup_seconds": "60", "cache_folder": str(cache), "max_batch_tokens": "128"}
    add_model(repository, "tagger", checkpoints["tagger"], **settings)
    # the same key as the encoder's: one of them measures for both
    same = repository / "again"
    same.mkdir()
    (same / "1").symlink_to(checkpoints["encoder"].resolve(), target_is_directory=True)
    (same / "config.pbtxt").write_text((repository / "encoder/config.pbtxt").read_text())

    with started(repository) as server:
        log = server.log()

    assert len(re.findall(MEASURED, log)) == 2, log
    assert len(re.findall(READ, log)) == 1
    assert len(CostStore(cache).entries()) == 2


def test_what_profile_costs_measured_is_what_the_first_start_reads(repository, cache):
    command = [sys.executable, "-m", "varlen_tools.profile_costs", str(repository / "encoder")]
    profiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert profiled.returncode == 0, profiled.stdout + profiled.stderr
    assert "milliseconds per batch" in profiled.stdout

    with started(repository) as server:
        log = server.log()

    assert re.search(READ, log), log
    assert "costs measured" not in log
    assert len(CostStore(cache).entries()) == 1
