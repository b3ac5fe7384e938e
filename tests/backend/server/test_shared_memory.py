"""Large answers need shared memory before they run, and are sent one at a time."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import pytest

from tests.backend.refusals import raises, refused_request
from tests.processes import NOBODY, locked_by, needs_root
from varlen.errors import EngineError, QueueFullError, RequestError
from varlen.server import shared_memory
from varlen.server.shared_memory import check_answer, hide_pool, sending

MEGABYTE = 1 << 20
SECONDS = 20.0


class Memory:
    """What the tests say is there, in MiB."""

    f_frsize = MEGABYTE

    def __init__(self, total, free):
        self.f_blocks, self.f_bavail = total, free


@pytest.fixture
def memory(monkeypatch):
    """Return a function that sets shared memory, in MiB."""

    def set_memory(*, total, free, pool=0, step=1):
        found = shared_memory._Pool(pool * MEGABYTE, step * MEGABYTE)
        monkeypatch.setattr(os, "statvfs", lambda _: Memory(total, free))
        monkeypatch.setattr(shared_memory._Pool, "of_process", lambda: found)

    return set_memory


def refusals(size):
    """Return the errors of an answer of `size` MiB: before it runs, before its send."""
    found = []
    for check in (check_answer, lambda size: sending(size).__enter__()):
        try:
            check(size * MEGABYTE)
        except Exception as error:
            found.append(type(error))
        else:
            found.append(None)
    return found


def test_an_answer_that_no_memory_holds_is_the_clients_fault(memory):
    memory(total=62, free=62)

    check_answer(20 * MEGABYTE)
    message = (
        "the answer has 22020096 bytes; the shared memory of this server is enough for 20971520"
    )
    with refused_request(message):
        check_answer(21 * MEGABYTE)


def test_an_answer_may_come_again_later_if_memory_is_taken_now(memory):
    memory(total=62, free=40)

    message = "the server has too little shared memory left for an answer of 20971520 bytes: send"
    with raises(QueueFullError, message):
        check_answer(20 * MEGABYTE)


def test_the_pool_of_the_process_counts_since_answers_reuse_it(memory):
    memory(total=62, free=23, pool=38)
    assert refusals(20) == [QueueFullError, None]
    memory(total=62, free=23, pool=39)
    assert refusals(20) == [None, None]
    memory(total=62, free=10, pool=39)
    assert refusals(20) == [QueueFullError, EngineError]
    memory(total=62, free=10, pool=40)
    assert refusals(20) == [None, None]


def test_a_response_is_sent_if_free_memory_or_the_pool_is_sure_to_hold_it(memory):
    memory(total=60, free=32, pool=0)
    # of unknown length before
    assert refusals(30) == [RequestError, None]
    assert refusals(31) == [RequestError, EngineError]


@pytest.mark.parametrize(
    "total, free, pool, expected",
    [
        (600, 100, 50, EngineError),
        (600, 300, 50, None),
        (600, 10, 50, EngineError),
        (600, 10, 60, None),
    ],
)
def test_a_pool_that_grows_in_large_steps_needs_room_for_them(memory, total, free, pool, expected):
    memory(total=total, free=free, pool=pool, step=64)

    assert refusals(30) == [expected and QueueFullError, expected]


def test_a_small_answer_asks_nothing_of_the_file_system(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: pytest.fail("asked"))

    check_answer(MEGABYTE - 1)
    with sending(MEGABYTE - 1):
        pass


def test_the_pool_and_its_step_are_arguments_of_the_python_backends_process(monkeypatch, tmp_path):
    (tmp_path / "pool_1").write_bytes(b"12345")
    command = b"stub\0/models/m\0pool_1\0001048576\00067108864\0"
    monkeypatch.setattr(shared_memory, "_FOLDER", str(tmp_path))
    monkeypatch.setattr(Path, "read_bytes", lambda _: command)
    assert shared_memory._Pool.of_process() == shared_memory._Pool(5, 64 * MEGABYTE)

    for other in (b"python\0", b"python\0-m\0varlen\0a\0b\0", b"python\0-c\0../pool_1\0a\0b\0"):
        monkeypatch.setattr(Path, "read_bytes", lambda _, other=other: other)
        assert shared_memory._Pool.of_process() == shared_memory._Pool(0, MEGABYTE)


def test_only_the_user_of_the_process_may_read_the_pool(monkeypatch, tmp_path):
    pool = tmp_path / "pool_1"
    pool.touch(mode=0o644)
    monkeypatch.setattr(shared_memory, "_FOLDER", str(tmp_path))
    for command in (b"python\0-m\0varlen\0", b"stub\0/models/m\0pool_2\0001048576\0001048576\0"):
        monkeypatch.setattr(Path, "read_bytes", lambda _, command=command: command)
        hide_pool()
        assert pool.stat().st_mode & 0o777 == 0o644

    command = b"stub\0/models/m\0pool_1\0001048576\0001048576\0"
    monkeypatch.setattr(Path, "read_bytes", lambda _: command)
    hide_pool()

    assert pool.stat().st_mode & 0o777 == 0o600


def test_large_answers_are_sent_one_at_a_time_and_small_ones_meanwhile():
    begun, second_sent = Event(), Event()

    def send_second():
        begun.set()
        with sending(2 * MEGABYTE):
            second_sent.set()

    with sending(2 * MEGABYTE):
        thread = Thread(target=send_second)
        thread.start()
        assert begun.wait(SECONDS)
        with sending(10):
            assert not second_sent.wait(0.05)
    assert second_sent.wait(SECONDS)
    thread.join()


def test_a_send_that_never_ends_does_not_stop_the_others_for_good(monkeypatch, tmp_path):
    # servers of other tests lock the real folder
    monkeypatch.setattr(shared_memory, "_FOLDER", str(tmp_path))
    monkeypatch.setattr(shared_memory, "_LOCK_SECONDS", 0.0)

    with (
        sending(2 * MEGABYTE),
        pytest.raises(EngineError, match="other models are not sent in time"),
        sending(2 * MEGABYTE),
    ):
        pytest.fail("sent beside another")


@needs_root
def test_a_lock_of_another_user_is_not_waited_for(monkeypatch, caplog):
    """Any user may open the folder, and so held each large answer for 30 s."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        monkeypatch.setattr(shared_memory, "_FOLDER", folder)
        with locked_by(NOBODY, Path(folder)) as pid:
            with sending(2 * MEGABYTE):
                pass

    assert f"locked by process {pid} of user {NOBODY}" in caplog.text


def test_a_failed_send_lets_the_next_one_go():
    for _ in range(2):
        with pytest.raises(OSError, match="send"), sending(2 * MEGABYTE):
            raise OSError("send")
