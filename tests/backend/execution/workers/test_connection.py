"""The engine's connection to a worker process."""

import pytest

from varlen.config import EngineConfig
from varlen.execution.workers.connection import LATER_SECONDS, hung_after


@pytest.mark.parametrize("stages", [2, 5, 64])
def test_a_leader_that_waits_for_a_lost_stage_is_not_hung(stages):
    config = EngineConfig(device="cpu", pipeline_parallel=stages, rank_timeout_seconds=10)

    # the last stage, which leads, waits longest, and then reports the lost one
    assert hung_after(config).seconds > 10 + LATER_SECONDS * (stages - 1) + 1
