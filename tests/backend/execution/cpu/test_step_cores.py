"""The cores of a step, on a virtual clock."""

import random

import pytest

from varlen.execution.cpu.runner import StepCores

from ...fakes.engine_parts import Clock


class Steps:
    """Runs steps whose time depends on tokens and cores; lists the cores of each."""

    def __init__(self, seconds):
        self.clock = Clock()
        self.cores = StepCores(self.clock)
        self.seconds = seconds
        self.used = []

    def run(self, tokens, cores=4):
        def step(count):
            self.used.append(count)
            self.clock.now += self.seconds(tokens, count)

        self.cores.run(step, tokens, cores)


@pytest.mark.parametrize(("one", "four", "better"), [(1e-3, 2e-3, 1), (2e-3, 1e-3, 4)])
def test_most_steps_run_on_the_faster_choice_and_some_on_the_other(one, four, better):
    steps = Steps(lambda _, cores: one if cores == 1 else four)

    for _ in range(1000):
        steps.run(8)

    assert 0.97 < steps.used.count(better) / 1000 < 1


def test_the_choice_follows_the_machine():
    steps = Steps(lambda _, cores: 1e-3 if cores == 1 else 2e-3)
    for _ in range(100):
        steps.run(8)

    # other work has left the other cores
    steps.seconds = lambda _, cores: 1e-3 if cores == 1 else 3e-4
    for _ in range(500):
        steps.run(8)

    assert steps.used[-60:].count(4) >= 59


def test_each_size_has_its_own_choice_and_noise_does_not_change_it():
    rng = random.Random(0)

    def seconds(tokens, cores):
        gain = 2.0 if tokens > 10 else 0.7
        return (1e-3 if cores == 1 else 1e-3 / gain) * rng.uniform(1, 1.1)

    steps = Steps(seconds)
    for _ in range(300):
        steps.run(3)
        steps.run(50)

    assert steps.used[100::2].count(1) > 240
    assert steps.used[101::2].count(4) > 240


def test_a_long_step_is_never_tried_on_one_core():
    steps = Steps(lambda _, cores: 0.03 / cores)

    for _ in range(200):
        steps.run(64)

    assert set(steps.used) == {4}


def test_trials_cost_little_on_many_cores():
    steps = Steps(lambda _, cores: 0.128 / cores)

    for _ in range(5000):
        steps.run(8, cores=32)

    # trials of 32 times the time of the others
    assert steps.used.count(1) <= 7
    assert steps.used[-100:].count(1) <= 1


def test_a_choice_that_was_much_slower_is_tried_again():
    steps = Steps(lambda _, cores: 0.016 / cores)
    for _ in range(1000):
        steps.run(8, cores=8)

    # other work has the other cores
    steps.seconds = lambda _, cores: 2e-3 if cores == 1 else 4e-3
    for _ in range(9000):
        steps.run(8, cores=8)

    assert steps.used[-1000:].count(1) > 970


def test_with_one_core_nothing_is_tried():
    steps = Steps(lambda *_: 1e-3)

    for _ in range(100):
        steps.run(8, cores=1)

    assert set(steps.used) == {1}
