"""The cost store: entries survive a restart, and a damaged one is never an error."""

import json
import logging
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.costs import store as cost_store
from varlen.costs.model import MeasuredBatch
from varlen.costs.store import CostStore, Measurement, StoredCosts, digest_of

KEY = {"checkpoint": "a1b2", "device": "A CPU, 2 cores", "dtype": "float32", "threads": "2"}
SECONDS = st.floats(1e-7, 1e3)
MEASUREMENTS = st.builds(
    Measurement,
    batches=st.lists(
        st.builds(
            MeasuredBatch,
            st.lists(st.integers(1, 512), min_size=1, max_size=9).map(tuple),
            SECONDS,
        ),
        max_size=5,
    ).map(tuple),
    is_complete=st.booleans(),
    seconds=st.floats(0.0, 100.0),
    spread=st.floats(1.0, 50.0),
)
SMALL = Measurement((MeasuredBatch((4,), 1e-3), MeasuredBatch((4, 7), 3e-3)), True, 0.5)


def costs(key=KEY, measurement=SMALL):
    return StoredCosts.now(key, 20.0, measurement)


def file_of(folder):
    (path,) = folder.glob("costs_*.json")
    return path


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _no_warning_yet():
    cost_store._warn.cache_clear()


@pytest.fixture
def store(tmp_path):
    return CostStore(tmp_path / "cache" / "varlen")


@pytest.fixture
def folder(tmp_path, store):
    """The folder of a store that holds one entry."""
    assert store.save(costs())
    return tmp_path / "cache" / "varlen"


def test_nothing_is_known_of_a_new_folder(store, caplog):
    assert store.load(KEY) is None
    assert store.entries() == []
    assert warnings(caplog) == []


@given(measurement=MEASUREMENTS)
@settings(max_examples=30)
def test_what_was_measured_comes_back_as_it_was(tmp_path_factory, measurement):
    folder = tmp_path_factory.mktemp("cache")
    saved = costs(measurement=measurement)

    assert CostStore(folder).save(saved)

    assert CostStore(folder).load(KEY) == saved


@pytest.mark.parametrize("name", KEY)
def test_costs_of_another_key_are_other_costs(store, name):
    store.save(costs())

    assert store.load(KEY | {name: "another"}) is None
    assert store.load({key: value for key, value in KEY.items() if key != name}) is None


def test_the_order_of_a_key_makes_no_difference():
    assert digest_of(KEY) == digest_of(dict(reversed(KEY.items())))


def test_costs_that_are_measured_again_replace_the_old_ones(store):
    store.save(costs())
    new = costs(measurement=Measurement((MeasuredBatch((8,), 4e-3),), False, 9.0))

    store.save(new)

    assert store.load(KEY) == new
    assert store.entries() == [new]


def test_entries_are_listed_newest_first(store):
    old = costs()
    old = replace(old, measured_at=old.measured_at - timedelta(days=1))
    new = costs(KEY | {"dtype": "bfloat16"})
    for entry in (old, new):
        store.save(entry)

    assert store.entries() == [new, old]


DAMAGES = {
    "text": lambda path: path.write_bytes(b"not JSON at all"),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(b"\xff" * 100),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "a list": lambda path: path.write_bytes(b"[]"),
    "a number beyond fp64": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"seconds": 0.5', b'"seconds": 1' + b"0" * 400)
    ),
    "too large": lambda path: path.write_bytes(b" " * (cost_store._MOST_BYTES + 1)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_costs_a_warning_and_is_replaced(folder, damage, caplog):
    damage(file_of(folder))
    store = CostStore(folder)

    assert store.load(KEY) is None
    assert store.load(KEY) is None
    assert store.entries() == []

    assert len(warnings(caplog)) == 1
    assert store.save(costs())
    assert CostStore(folder).load(KEY) is not None


@pytest.mark.parametrize(
    "name, value",
    [
        ("batches", [[[4], -1.0]]),
        ("batches", [[[4], "soon"]]),
        ("batches", [[[4], float("inf")]]),
        ("batches", [["{", 1.0]]),
        ("batches", [[7, 1.0]]),
        ("batches", [[[0], 1.0]]),
        ("batches", [[["many"], 1.0]]),
        ("batches", [[4]]),
        ("batches", None),
        ("measured_at", "yesterday"),
        ("measured_at", "2026-01-01"),
        ("key", "a checkpoint"),
        ("key", {"of": "another"}),
        ("allowed_seconds", "long"),
        ("spread", 0),
    ],
)
def test_an_entry_that_was_tampered_with_counts_as_none_and_can_be_replaced(
    folder, name, value, caplog
):
    path = file_of(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    assert CostStore(folder).load(KEY) is None

    assert len(warnings(caplog)) == 1
    assert CostStore(folder).save(costs())
    assert CostStore(folder).load(KEY) is not None


def test_paths_come_back_as_they_were(store, folder):
    paths = {"384x384": "panels"}

    assert store.load_texts(KEY) is None
    assert store.save_texts(KEY, paths)
    assert store.load_texts(KEY) == paths
    assert [each.key for each in store.entries()] == [KEY]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_costs_a_warning(folder, caplog):
    folder.chmod(0o500)
    store = CostStore(folder)

    assert store.load(KEY) is not None
    assert not store.save(costs())
    with store.measuring(timeout=1):
        pass

    assert len(warnings(caplog)) == 1
    folder.chmod(0o700)


@pytest.mark.parametrize("place", ["/dev/null/varlen", "/proc/varlen"])
def test_a_folder_that_cannot_be_made_costs_a_warning(place, caplog):
    store = CostStore(Path(place))

    assert store.load(KEY) is None
    assert not store.save(costs())
    with store.measuring(timeout=1):
        pass

    assert place in warnings(caplog)[0]


def test_without_a_folder_nothing_is_stored(caplog):
    store = CostStore(None)

    assert store.load(KEY) is None
    assert not store.save(costs())
    assert not store.save_texts(KEY, {})
    assert store.entries() == []
    with store.measuring(timeout=1):
        pass
    assert warnings(caplog) == []


@pytest.mark.parametrize("how", ["writable by all", "a link", "a pipe", "a folder"])
def test_what_others_could_have_put_there_is_not_read(folder, how, caplog):
    """A database of another user held a start for ever."""
    path = file_of(folder)
    if how == "writable by all":
        path.chmod(0o666)
    else:
        moved = path.rename(folder / "elsewhere")
        if how == "a link":
            path.symlink_to(moved)
        elif how == "a pipe":
            os.mkfifo(path)
        else:
            path.mkdir()

    assert CostStore(folder).load(KEY) is None

    assert len(warnings(caplog)) == 1
    assert "is not used" in warnings(caplog)[0] or "cannot be used" in warnings(caplog)[0]


def test_a_lock_that_is_a_link_empties_no_file(folder, tmp_path):
    target = tmp_path / "precious"
    target.write_text("to be kept")
    (folder / "measuring.lock").symlink_to(target)

    with CostStore(folder).measuring(timeout=1):
        pass

    assert target.read_text() == "to be kept"


def save_some(arguments):
    """Save entries in another process; return whether each was saved and found."""
    folder, process = arguments
    store = CostStore(folder)
    keys = [KEY | {"process": str(process), "entry": str(entry)} for entry in range(5)]
    return all(store.save(costs(key)) and store.load(key) for key in keys)


def test_several_processes_may_begin_and_use_one_folder_at_once(tmp_path):
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        assert all(pool.map(save_some, [(tmp_path, process) for process in range(4)]))

    assert len(CostStore(tmp_path).entries()) == 20


def test_one_measures_at_a_time(tmp_path):
    order = []

    def second():
        with CostStore(tmp_path).measuring(timeout=30):
            order.append("second")

    with CostStore(tmp_path).measuring(timeout=30):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join()

    assert order == ["first", "second"]


def test_waiting_for_another_process_to_measure_ends(tmp_path, caplog):
    with CostStore(tmp_path).measuring(timeout=30):
        with CostStore(tmp_path).measuring(timeout=0.1):
            pass

    (said,) = warnings(caplog)
    assert "still being measured" in said
    assert f"locked by process {os.getpid()}" in said


def test_an_error_while_measuring_lets_the_next_one_measure(tmp_path, caplog):
    with pytest.raises(MemoryError), CostStore(tmp_path).measuring(timeout=1):
        raise MemoryError
    with CostStore(tmp_path).measuring(timeout=1):
        pass

    assert warnings(caplog) == []
