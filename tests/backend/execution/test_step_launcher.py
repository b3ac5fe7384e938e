"""Steps are launched early where the device chooses their tokens, never after a failure."""

from itertools import count

import pytest

from varlen.costs.batch_shape import BatchShape
from varlen.execution.executor import SkippedStepError
from varlen.execution.step_launcher import StepLauncher
from varlen.scheduling.sequence import Draws, SampledToken, StepBatch

DRAWN, CHOSEN = Draws([(0.0, 0, 1.0, 0.0)], None), None


class Device:
    """Lists what happens to steps.

    Attributes:
        happened: names of calls and the number of the step.
        failing: calls that fail.
    """

    def __init__(self):
        self.happened = []
        self.failing = set()

    def _do(self, what, step):
        self.happened.append((what, step.number))
        if (what, step.number) in self.failing:
            raise ZeroDivisionError

    def pack(self, step, draws):
        self._do("pack", step)
        return draws

    def start(self, step, packed):
        self._do("start", step)

        def tokens():
            self._do("wait", step)
            return [] if packed is None else [100 + step.number]

        return tokens

    def choose(self, step):
        self._do("choose", step)
        return [SampledToken(200 + step.number)]


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def launch(device):
    """Return a function that launches a step and returns what waits for it."""
    draws, numbers = [], count()
    launcher = StepLauncher(device, lambda *_: draws.pop())

    def launch(of_step, after=None):
        draws.append(of_step)
        number = next(numbers)
        step = StepBatch((), BatchShape.of([1]), 1.0, "", (), (), number, after)
        return launcher.launch(step)

    launch.launcher = launcher
    return launch


def test_drawn_steps_start_when_they_are_launched(launch, device):
    first, second = launch(DRAWN), launch(DRAWN, after=0)

    assert device.happened == [("pack", 0), ("start", 0), ("pack", 1), ("start", 1)]
    assert [token.token_id for outputs in (first(), second()) for token in outputs] == [100, 101]
    assert device.happened[4:] == [("wait", 0), ("wait", 1)]


def test_a_step_after_a_choice_of_the_host_is_packed_before_and_starts_behind_it(launch, device):
    first, second = launch(CHOSEN), launch(DRAWN, after=0)

    assert device.happened == [("pack", 0), ("start", 0), ("pack", 1)]
    assert first() == [SampledToken(200)]
    assert device.happened[3:] == [("wait", 0), ("choose", 0), ("start", 1)]
    assert second() == [SampledToken(101)]


def test_a_choice_of_the_host_may_wait_for_drawn_tokens_on_the_device(launch, device):
    first, second = launch(DRAWN), launch(CHOSEN, after=0)

    assert ("start", 1) in device.happened
    assert first() == [SampledToken(100)]
    assert second() == [SampledToken(201)]


@pytest.mark.parametrize("what", ["start", "wait", "choose"])
@pytest.mark.parametrize("kind", [DRAWN, CHOSEN], ids=["drawn", "chosen"])
def test_a_step_behind_one_that_failed_is_skipped_and_the_one_behind_that_runs(
    launch, device, what, kind
):
    device.failing = {(what, 0)}
    first, second = launch(CHOSEN), launch(kind, after=0)

    with pytest.raises(ZeroDivisionError):
        first()
    # scheduled when it was known
    third = launch(DRAWN)
    with pytest.raises(SkippedStepError):
        second()
    assert ("choose", 1) not in device.happened
    assert third() == [SampledToken(102)]


def test_a_skipped_step_that_has_started_is_waited_for_once(launch, device):
    device.failing = {("wait", 0)}
    first, second = launch(DRAWN), launch(DRAWN, after=0)
    with pytest.raises(ZeroDivisionError):
        first()

    launch.launcher.drain()
    with pytest.raises(SkippedStepError):
        second()

    assert device.happened.count(("wait", 1)) == 1


def test_a_step_that_does_not_need_the_one_that_failed_runs(launch, device):
    device.failing = {("wait", 0)}
    first = launch(DRAWN)
    with pytest.raises(ZeroDivisionError):
        first()

    assert launch(DRAWN)() == [SampledToken(101)]


def test_only_steps_on_the_device_are_waited_for(launch, device):
    device.failing = {("start", 0)}
    first, second = launch(DRAWN), launch(DRAWN, after=0)

    # its error is there already
    assert not launch.launcher.awaits_device
    with pytest.raises(ZeroDivisionError):
        first()
    # it is skipped
    assert not launch.launcher.awaits_device
    with pytest.raises(SkippedStepError):
        second()
    launch(DRAWN)
    assert launch.launcher.awaits_device
