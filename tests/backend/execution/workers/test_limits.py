"""Limits of the time that processes take, and of how often they are started again."""

import pytest

from varlen.config import EngineConfig
from varlen.execution.workers.limits import RestartLimit, hung_after, longest_wait

from ...fakes.engine_parts import Clock


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
