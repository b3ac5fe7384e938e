"""The cost store: entries survive a restart, and a damaged file is never an error."""

import logging
import os
import sqlite3
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
from varlen.costs.measurement import Measurement
from varlen.costs.model import MeasuredBatch
from varlen.costs.store import CostStore, StoredCosts, digest_of

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
    (path,) = folder.glob("*.sqlite")
    return path


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


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
@settings(max_examples=30, deadline=None)
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"not a database at all" * 100),
        lambda path: path.write_bytes(path.read_bytes()[:100] + b"\xff" * 5000),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(b"SQLite format 3\0" + os.urandom(500)),
    ],
    ids=["text", "pages overwritten", "cut off", "noise behind the header"],
)
def test_a_corrupt_file_is_renamed_with_a_warning_and_a_new_one_begun(folder, damage, caplog):
    path = file_of(folder)
    damage(path)
    content = path.read_bytes()
    store = CostStore(folder)

    assert store.load(KEY) is None

    (said,) = warnings(caplog)
    assert "damaged" in said
    aside = path.with_name(f"{path.name}.corrupt-1")
    assert str(aside) in said
    assert aside.read_bytes() == content
    assert store.save(costs())
    assert CostStore(folder).load(KEY) is not None


def test_corrupt_files_are_numbered(folder):
    for number in (1, 2, 3):
        path = file_of(folder)
        path.write_bytes(b"nonsense %d" % number * 100)
        assert CostStore(folder).load(KEY) is None
        assert path.with_name(f"{path.name}.corrupt-{number}").is_file()


def test_the_journal_of_a_corrupt_file_does_not_outlive_it(folder):
    path = file_of(folder)
    path.write_bytes(b"nonsense" * 1000)
    journal = path.with_name(f"{path.name}-journal")
    journal.write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(600))

    assert CostStore(folder).save(costs())

    assert not journal.exists()
    assert CostStore(folder).load(KEY) is not None


def test_an_empty_file_is_a_new_one(folder, caplog):
    file_of(folder).write_bytes(b"")

    assert CostStore(folder).load(KEY) is None
    assert CostStore(folder).save(costs())

    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE batches SET seconds = -1.0",
        "UPDATE batches SET seconds = 'soon'",
        "UPDATE batches SET seconds = 9e999",
        "UPDATE batches SET lengths = '{'",
        "UPDATE batches SET lengths = '7'",
        "UPDATE batches SET lengths = '[0]'",
        "UPDATE batches SET lengths = '[\"many\"]'",
        "UPDATE costs SET measured_at = 'yesterday'",
        "UPDATE costs SET key = 'a checkpoint'",
        "UPDATE costs SET key = CAST(x'ff' AS TEXT)",
        "UPDATE costs SET allowed_seconds = 'long'",
        "UPDATE costs SET spread = 0",
        "ALTER TABLE batches RENAME COLUMN seconds TO minutes",
    ],
)
def test_an_entry_that_was_tampered_with_counts_as_none_and_can_be_replaced(
    folder, statement, caplog
):
    with sqlite3.connect(file_of(folder)) as database:
        database.execute(statement)
    database.close()

    assert CostStore(folder).load(KEY) is None

    assert len(warnings(caplog)) == 1
    if "ALTER" not in statement:
        assert CostStore(folder).save(costs())
        assert CostStore(folder).load(KEY) is not None


def test_a_locked_file_costs_a_warning(folder, monkeypatch, caplog):
    monkeypatch.setattr(cost_store, "_BUSY_SECONDS", 0.1)
    other = sqlite3.connect(file_of(folder), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store = CostStore(folder)

    assert store.load(KEY) is None
    assert store.load(KEY) is None
    assert not store.save(costs())

    # one warning per cause
    assert len(warnings(caplog)) == 1
    assert "locked" in warnings(caplog)[0]
    other.close()
    assert store.load(KEY) is not None


def test_a_file_that_is_soon_unlocked_is_waited_for(folder, caplog):
    other = sqlite3.connect(file_of(folder), isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(0.2, other.close)
    timer.start()

    assert CostStore(folder).load(KEY) is not None

    timer.join()
    assert warnings(caplog) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_costs_a_warning(folder, caplog):
    path = file_of(folder)
    path.chmod(0o400)
    folder.chmod(0o500)
    store = CostStore(folder)

    assert store.load(KEY) is not None
    assert not store.save(costs())
    with store.measuring(timeout=1):
        pass

    assert len(warnings(caplog)) == 1
    folder.chmod(0o700)


def test_a_read_only_database_can_be_read(folder, monkeypatch, caplog):
    path = file_of(folder)
    connect = sqlite3.connect

    def read_only(_, **arguments):
        return connect(f"file:{path}?mode=ro", uri=True, **arguments)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    store = CostStore(folder)

    assert store.load(KEY) is not None
    assert not store.save(costs())

    (said,) = warnings(caplog)
    assert "readonly" in said


@pytest.mark.parametrize("place", ["/dev/null/varlen", "/proc/varlen"])
def test_a_folder_that_cannot_be_made_costs_a_warning(place, caplog):
    store = CostStore(Path(place))

    assert store.load(KEY) is None
    assert not store.save(costs())
    with store.measuring(timeout=1):
        pass

    assert len(warnings(caplog)) == 1
    assert place in warnings(caplog)[0]


def test_a_folder_where_the_file_should_be_costs_a_warning(folder, caplog):
    path = file_of(folder)
    path.unlink()
    path.mkdir()

    assert CostStore(folder).load(KEY) is None

    assert len(warnings(caplog)) == 1


def save_some(arguments):
    """Save entries in another process; return whether each was saved and found."""
    folder, process = arguments
    store = CostStore(folder)
    keys = [KEY | {"process": str(process), "entry": str(entry)} for entry in range(5)]
    return all(store.save(costs(key)) and store.load(key) for key in keys)


def test_several_processes_may_begin_and_use_one_file_at_once(tmp_path):
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        assert all(pool.map(save_some, [(tmp_path, process) for process in range(4)]))

    assert len(CostStore(tmp_path).entries()) == 20


def test_a_corrupt_file_that_another_process_has_replaced_is_left_alone(
    folder, monkeypatch, caplog
):
    path = file_of(folder)
    good = path.read_bytes()
    path.write_bytes(b"nonsense" * 1000)
    store = CostStore(folder)
    work = store._work_once
    calls = []

    def work_once(task):
        try:
            return work(task)
        finally:
            if not calls:
                # another process replaces it first
                path.rename(path.with_suffix(".theirs"))
                path.write_bytes(good)
            calls.append(task)

    monkeypatch.setattr(store, "_work_once", work_once)

    assert store.load(KEY) is not None
    assert len(calls) == 2
    assert warnings(caplog) == []


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


def test_an_error_while_measuring_lets_the_next_one_measure(tmp_path, caplog):
    with pytest.raises(MemoryError), CostStore(tmp_path).measuring(timeout=1):
        raise MemoryError
    with CostStore(tmp_path).measuring(timeout=1):
        pass

    assert warnings(caplog) == []
