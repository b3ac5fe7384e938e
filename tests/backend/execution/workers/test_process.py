"""Processes of a model: an early start, the time they take, and restarts."""

import os
import re
import signal
import socket
import time
from pathlib import Path
from threading import Thread

import pytest

from varlen.config import EngineConfig
from varlen.execution.workers import child, process
from varlen.execution.workers.messages import MEMBER
from varlen.execution.workers.process import (
    ControlledProcess,
    ModelProcess,
    RestartLimit,
    longest_wait,
    start_early,
)
from varlen.execution.workers.worker import hung_after

from ...fakes.engine_parts import Clock

CONFIG = EngineConfig(device="cpu", dtype="fp32", threads=1, warmup_seconds=0)


@pytest.fixture
def waiting(small_bert, monkeypatch):
    """Return the process that waits for the engine of `small_bert`."""
    started = []
    with monkeypatch.context() as patch:
        start = process._start
        patch.setattr(
            process, "_start", lambda *each, **named: started.append(start(*each, **named))
        )
        start_early(small_bert, CONFIG, generates=False)
    # a flag of sockets that accept connections
    listening = re.compile(rf" 00010000 .*{process._address(small_bert)[1:]}$", re.MULTILINE)
    while not listening.search(Path("/proc/net/unix").read_text()):
        time.sleep(0.01)
    with started[0]:
        yield started[0]
        started[0].kill()


def test_the_next_model_runs_in_the_process_that_waits(small_bert, waiting):
    first, second = (ModelProcess(small_bert, CONFIG, generates=False) for _ in range(2))

    try:
        assert first.pid == waiting.pid
        assert second.pid != waiting.pid
    finally:
        second.close()
        first.close()
    assert waiting.wait(60) == 0


def test_a_process_that_waits_and_does_not_end_is_killed(small_bert, waiting):
    taken = ControlledProcess(new_session=True, folder=small_bert)
    waiting.send_signal(signal.SIGSTOP)

    taken.end(0.01)

    assert taken.code is None
    assert waiting.wait(60) == -signal.SIGKILL


def test_a_process_of_another_user_is_not_taken_over(small_bert, waiting, monkeypatch):
    monkeypatch.setattr(process, "peer_of", lambda _: (waiting.pid, os.getuid() + 1))

    started = ControlledProcess(new_session=True, folder=small_bert)

    assert started.pid != waiting.pid
    started.end(0.0)


def test_a_process_ends_if_no_engine_of_its_user_takes_it_over(monkeypatch):
    monkeypatch.setattr(child, "_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(child, "peer_of", lambda _: (0, os.getuid() + 1))
    monkeypatch.setattr(child, "_import_work", lambda: None)
    kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
    with socket.socket(*kind) as address, socket.socket(*kind) as engine:
        # any free one
        address.bind("")
        address.listen(1)
        engine.connect(address.getsockname())

        with pytest.raises(SystemExit):
            child._taken_over(address)


@pytest.mark.parametrize(
    "config",
    [EngineConfig(device="cuda"), EngineConfig(device="cpu", tensor_parallel=2)],
    ids=["gpu", "ranks"],
)
def test_no_process_waits_for_a_model_on_a_gpu_or_in_ranks(monkeypatch, tmp_path, config):
    started = []
    monkeypatch.setattr(process, "_start", lambda *each, **_: started.append(each))

    start_early(tmp_path, config, generates=True)

    assert not started


def test_a_process_whose_engine_ends_before_the_load_ends_too():
    started = ControlledProcess(new_session=False)

    started.end(60)

    assert started.code == 0


def test_a_member_ends_with_its_leader_while_it_imports_torch():
    members = []

    def lead():
        members.append(ControlledProcess(MEMBER, new_session=False))
        maps = Path(f"/proc/{members[0].pid}/maps")
        while "libtorch" not in maps.read_text():
            time.sleep(0.01)

    leader = Thread(target=lead)
    leader.start()
    leader.join()

    assert members[0]._process.wait(60) == -9
    members[0].end()


def test_a_model_that_may_find_a_gpu_is_not_started_early(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_GPU_FILES", (tmp_path,))

    assert process.excludes_gpu("cpu")
    assert not process.excludes_gpu("auto")
    assert not process.excludes_gpu("cuda")


@pytest.mark.parametrize("stages", [2, 5, 64])
def test_a_leader_that_waits_for_a_lost_stage_is_not_hung(stages):
    config = EngineConfig(device="cpu", pipeline_parallel=stages, rank_timeout_seconds=10)

    # the last stage, which leads, waits longest, and then reports the lost one
    assert hung_after(config).seconds > longest_wait(config, stages - 1) + 1


def test_each_stage_has_the_time_of_the_setting():
    config = EngineConfig(device="cpu", pipeline_parallel=4, rank_timeout_seconds=10)

    limits = [longest_wait(config, before) for before in (1, 2, 3)]

    # a stage waits for all before it, and reports before the one behind it does
    assert [limit // 10 for limit in limits] == [1, 2, 3]
    assert limits == sorted(set(limits))


def test_restarts_end_at_the_limit_and_count_for_a_period():
    clock = Clock()
    limit = RestartLimit(3, 600.0, lambda: clock.now)
    clock.now = 100.0
    assert limit.allow()
    clock.now = 400.0
    assert limit.allow()
    assert limit.allow()
    assert not limit.allow()

    clock.now = 699.0
    assert not limit.allow()
    clock.now = 700.0
    assert limit.allow()
    assert not limit.allow()
