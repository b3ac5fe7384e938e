"""Expected run times follow the speed of the machine, not what was expected before."""

import numpy as np
import pytest

from varlen.costs.model import BatchLimits, BatchShape, CostModel
from varlen.scheduling.one_shot.one_shot import Forecaster

SHAPE = BatchShape.of([100] * 4)


def costs():
    return CostModel.of_function(
        lambda count, length: 1e-3 + 1e-4 * count * length,
        "packed",
        max_sequences=16,
        max_length=256,
    )


@pytest.mark.parametrize("slowdown", [1.3, 2.0])
def test_a_slower_machine_is_known_and_not_overrated(slowdown):
    forecaster = Forecaster(costs(), BatchLimits(16, 4096))
    usual = costs().seconds(SHAPE)
    noise = np.random.default_rng(0).normal(1.0, 0.05, 2000)
    reached = []

    for each in noise:
        forecaster.learn(SHAPE, slowdown * usual * each)
        reached.append(forecaster.slowdown)

    assert max(reached) < 1.15 * slowdown
    predicted = forecaster.slowdown * forecaster._costs.seconds(SHAPE)
    assert predicted == pytest.approx(slowdown * usual, rel=0.1)
