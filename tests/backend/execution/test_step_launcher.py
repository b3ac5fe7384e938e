"""Steps are launched early where the device chooses their tokens, never after a failure."""

import sys
from itertools import count
from queue import SimpleQueue
from threading import Thread

import pytest

from varlen.costs.model import BatchShape
from varlen.errors import EngineError
from varlen.execution.executor import SkippedStepError, StepLauncher
from varlen.execution.token_state import NoChooser
from varlen.scheduling.batch import Batch
from varlen.scheduling.device_plan import Chosen, DevicePlan, Draws, SampledToken

DRAWN, CHOSEN = DevicePlan(Draws([(0.0, 0, 1.0, 0.0)], None), is_whole=True), DevicePlan()


class Device:
    """Lists what happens to steps.

    Attributes:
        happened: names of calls and the number of the step.
        failing: calls that fail.
    """

    def __init__(self):
        self.happened = []
        self.failing = set()
        self.takes_more = True

    def _do(self, what, step):
        self.happened.append((what, step.number))
        if (what, step.number) in self.failing:
            raise ZeroDivisionError

    def pack(self, step, plan):
        self._do("pack", step)
        return plan

    def may_queue(self, packed):
        return self.takes_more

    def start(self, step, packed):
        self._do("start", step)

        def chosen():
            self._do("wait", step)
            return Chosen([100 + step.number] if packed.is_whole else ())

        return chosen

    def choose(self, step, packed, plan, chosen):
        self._do("choose", step)
        assert not plan.is_whole
        assert chosen == Chosen()
        return [SampledToken(200 + step.number)]


@pytest.fixture
def device():
    return Device()


class PlannedChooser(NoChooser):
    """Chooses on the device what the next step is told.

    Attributes:
        told: choices of the next steps; None fails.
        has_no_memory: whether outputs cannot be read.
    """

    def __init__(self):
        self.told = []
        self.has_no_memory = False

    def plan(self, step):
        of_step = self.told.pop()
        if of_step is None:
            raise ZeroDivisionError
        return of_step

    def outputs(self, step, plan, chosen, logits):
        assert plan.is_whole
        assert logits is None
        if self.has_no_memory:
            raise MemoryError
        return [SampledToken(token_id) for token_id in chosen.token_ids]


def launch_on(device, **settings):
    """Return a function that launches a step and returns what waits for it."""
    chooser, numbers = PlannedChooser(), count()
    launcher = StepLauncher(device, chooser, **settings)

    def launch(of_step, after=None):
        chooser.told.append(of_step)
        number = next(numbers)
        step = Batch((), BatchShape.of([1]), 1.0, "", (), (), number, after)
        return launcher.launch(step)

    launch.launcher, launch.chooser = launcher, chooser
    return launch


@pytest.fixture
def launch(device):
    return launch_on(device)


@pytest.fixture
def launch_apart(device):
    """Steps of different sequences, as the stages of a pipeline run them."""
    return launch_on(device, runs_apart=True)


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


def test_a_step_that_the_device_cannot_queue_starts_after_the_one_before(launch, device):
    device.takes_more = False
    first, second = launch(DRAWN), launch(DRAWN, after=0)

    assert device.happened == [("pack", 0), ("start", 0), ("pack", 1)]
    assert first() == [SampledToken(100)]
    assert device.happened[3:] == [("wait", 0), ("start", 1)]
    assert second() == [SampledToken(101)]


@pytest.mark.parametrize("what", ["pack", "start", "wait", "choose"])
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


def test_a_step_whose_choice_fails_fails_and_the_one_behind_it_is_skipped(launch, device):
    first, second = launch(None), launch(DRAWN, after=0)

    with pytest.raises(ZeroDivisionError):
        first()
    with pytest.raises(SkippedStepError):
        second()
    assert ("start", 1) not in device.happened


def test_a_step_whose_outputs_find_no_memory_does_not_run_again(launch, device):
    first, second = launch(DRAWN), launch(DRAWN, after=0)
    launch.chooser.has_no_memory = True

    # a MemoryError would repeat it, but the next step has run
    with pytest.raises(EngineError, match="too little memory to read"):
        first()
    with pytest.raises(SkippedStepError):
        second()
    launch.chooser.has_no_memory = False
    assert launch(DRAWN)() == [SampledToken(102)]


def test_one_thread_launches_steps_and_another_one_takes_their_outputs(launch, device):
    waiting, found = SimpleQueue(), []

    def take():
        while (outputs := waiting.get()) is not None:
            found.extend(outputs())
            free.put(None)

    free = SimpleQueue()
    free.put(None)
    free.put(None)
    taker = Thread(target=take)
    taker.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(3000):
            free.get(timeout=10.0)
            kind = CHOSEN if number % 3 == 0 else DRAWN
            waiting.put(launch(kind, after=number - 1 if number else None))
    finally:
        sys.setswitchinterval(before)
        waiting.put(None)
        taker.join(10.0)

    expected = [(200 if number % 3 == 0 else 100) + number for number in range(3000)]
    assert [token.token_id for token in found] == expected


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


@pytest.mark.parametrize("kind", [DRAWN, CHOSEN, None], ids=["drawn", "chosen", "failed"])
def test_a_step_of_other_sequences_starts_whatever_the_one_before_it_waits_for(
    launch_apart, device, kind
):
    first, second = launch_apart(kind), launch_apart(CHOSEN)

    assert ("start", 1) in device.happened
    if kind is None:
        with pytest.raises(ZeroDivisionError):
            first()
    else:
        first()
    assert second() == [SampledToken(201)]


@pytest.mark.parametrize("what", ["pack", "start", "wait", "choose"])
def test_a_step_of_other_sequences_runs_although_the_one_before_it_fails(
    launch_apart, device, what
):
    device.failing = {(what, 0)}
    first, second = launch_apart(CHOSEN), launch_apart(DRAWN)

    with pytest.raises(ZeroDivisionError):
        first()
    assert second() == [SampledToken(101)]


def test_what_settled_steps_have_chosen_is_kept(launch_apart, device):
    device.failing = {("wait", 1)}
    first, second, third = launch_apart(DRAWN), launch_apart(DRAWN), launch_apart(CHOSEN)

    launch_apart.launcher.settle()

    waits = [each for each in device.happened if each[0] == "wait"]
    assert waits == [("wait", 0), ("wait", 1), ("wait", 2)]
    assert first() == [SampledToken(100)]
    with pytest.raises(ZeroDivisionError):
        second()
    assert third() == [SampledToken(202)]
    assert waits == [each for each in device.happened if each[0] == "wait"]
