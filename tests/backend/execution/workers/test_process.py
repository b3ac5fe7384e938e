"""Processes of a model: an early start, the time they take, and restarts."""

import time
from pathlib import Path
from threading import Thread

import pytest

from varlen.config import EngineConfig
from varlen.execution.workers import process
from varlen.execution.workers.process import (
    ControlledProcess,
    ModelProcess,
    RestartLimit,
    longest_wait,
)
from varlen.execution.workers.worker import hung_after

from ...fakes.engine_parts import Clock


@pytest.mark.full
def test_the_next_model_runs_in_the_process_that_was_started_early(small_bert):
    config = EngineConfig(device="cpu", dtype="fp32", threads=1, warmup_seconds=0)
    with process.started_early(small_bert, config, generates=False):
        waiting = process._early[True].pid
        first, second = (ModelProcess(small_bert, config, generates=False) for _ in range(2))

    try:
        assert first.pid == waiting
        assert second.pid != waiting
    finally:
        first.close()
        second.close()


def test_a_process_that_no_model_has_taken_is_ended(tmp_path):
    with process.started_early(tmp_path, EngineConfig(), generates=True):
        unused = process._early[False]

    assert unused.code
    assert not process._early


def test_a_process_whose_engine_ends_before_the_load_ends_too():
    started = ControlledProcess(new_session=False)

    started.end(60)

    assert started.code == 0


def test_a_member_ends_with_its_leader_while_it_imports_torch():
    members = []

    def lead():
        members.append(ControlledProcess(new_session=False, is_member=True))
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
