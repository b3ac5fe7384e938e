"""A worker is started again a few times in any period."""

from varlen.execution.workers.restarts import RestartLimit

from ...fakes.engine_parts import Clock


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
