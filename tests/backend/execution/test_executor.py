"""Executors: each batch completes with a result, in another thread or at once."""

import gc
import weakref
from queue import SimpleQueue
from threading import Barrier, Event, current_thread

import numpy as np
import pytest

from varlen.costs.model import BatchShape
from varlen.execution.executor import InlineExecutor
from varlen.execution.thread_executor import CoreShare, ThreadExecutor
from varlen.scheduling.batch import Batch, RequestState

from ..fakes.engine_parts import Clock
from ..requests import request_of

SECONDS = 10.0


class FakeRunner:
    """Returns each prompt's length, or raises `error`; `check` raises it too if it `lasts`."""

    def __init__(self, error=None, lasts=False, missing=0, meet=None):
        self.error = error
        self.lasts = lasts
        self.missing = missing
        self.meet = meet or (lambda: None)
        self.seen = []

    slots = 1

    def launch_batch(self, batch):
        return lambda: self.run_batch(batch)

    def wait(self, timeout):
        return True

    def run_batch(self, batch):
        self.meet()
        self.seen.append([each.options.normalize for each in batch.sequences])
        if self.error is not None:
            raise self.error
        outputs = [np.array([each.prompt.num_tokens]) for each in batch.sequences]
        return outputs[: len(outputs) - self.missing]

    def check(self):
        if self.lasts:
            raise self.error


def batch_of(*lengths, normalize=False):
    request = request_of(*([0] * length for length in lengths), normalize=normalize)
    state = RequestState(request, None, 0.0)
    return Batch(state.sequences, BatchShape.of(lengths), 1.0, "")


@pytest.fixture(params=["threads", "inline"])
def run(request):
    """Return a function that runs batches and returns their results in the order of completion."""
    executors = []

    def run(*batches, runners):
        is_inline = request.param == "inline" and len(runners) == 1
        executor = InlineExecutor(*runners) if is_inline else ThreadExecutor(runners)
        executors.append(executor)
        assert executor.slots == len(runners)
        done = SimpleQueue()
        for batch in batches:
            executor.start(batch, lambda *completed: done.put(completed))
            assert executor.collect(None) == is_inline
        return [done.get(timeout=SECONDS) for _ in batches]

    yield run
    for executor in executors:
        executor.close()


def test_outputs_come_in_the_order_of_the_batch(run):
    batch, runner = batch_of(3, 1, 2, normalize=True), FakeRunner()

    [(completed, result)] = run(batch, runners=[runner])

    assert completed is batch
    assert [output.tolist() for output in result.outputs] == [[3], [1], [2]]
    assert result.failure is None
    assert result.seconds > 0.0
    assert runner.seen == [[True, True, True]]


def test_as_many_batches_run_together_as_there_are_runners(run):
    barrier = Barrier(3)
    runners = [FakeRunner(meet=lambda: barrier.wait(SECONDS)) for _ in range(3)]

    results = run(*(batch_of(n) for n in (1, 2, 3)), runners=runners)

    assert sorted(result.outputs[0].tolist() for _, result in results) == [[1], [2], [3]]
    assert [len(runner.seen) for runner in runners] == [1, 1, 1]


class FakeProcess(FakeRunner):
    """Keeps the threads that launch; raises `error` at once."""

    def __init__(self, **options):
        super().__init__(**options)
        self.launched_by = []

    def launch_batch(self, batch):
        self.launched_by.append(current_thread())
        if self.error is not None:
            raise self.error
        return super().launch_batch(batch)


def test_start_launches_a_batch_of_a_process_and_lone_batches_have_the_same_one():
    runners = [FakeProcess() for _ in range(2)]
    executor, done = ThreadExecutor(runners, starts_at_once=True), SimpleQueue()

    for length in (3, 1, 2):
        executor.start(batch_of(length), lambda *completed: done.put(completed))
        _, result = done.get(timeout=SECONDS)
        assert [output.tolist() for output in result.outputs] == [[length]]

    executor.close()
    assert sorted(len(each.launched_by) for each in runners) == [0, 3]
    assert {thread for each in runners for thread in each.launched_by} == {current_thread()}


def test_a_batch_that_cannot_be_launched_fails_alone():
    runner = FakeProcess(error=ValueError("no"))
    executor, done = ThreadExecutor([runner], starts_at_once=True), SimpleQueue()

    executor.start(batch_of(1), lambda *completed: done.put(completed))
    _, result = done.get(timeout=SECONDS)
    runner.error = None
    executor.start(batch_of(1), lambda *completed: done.put(completed))
    _, after = done.get(timeout=SECONDS)

    executor.close()
    assert (result.failure, after.failure) == ("batch", None)


def test_a_batch_has_all_cores_while_no_other_one_runs():
    share = CoreShare()
    runners = [FakeRunner() for _ in range(2)]
    gates = [Event(), Event()]
    for runner, gate in zip(runners, gates, strict=True):
        runner.meet = lambda gate=gate: gate.wait(SECONDS)
    executor = ThreadExecutor(runners, share=share)
    done = SimpleQueue()

    def cores_of_one():
        return done.get(timeout=SECONDS)[1].cores

    def start():
        executor.start(batch_of(1), lambda *completed: done.put(completed))

    for gate in gates:
        gate.set()
    start()
    # costs are measured on one core
    assert (cores_of_one(), share.is_alone) == ("one", False)
    share.is_on = True
    start()
    assert (cores_of_one(), share.is_alone) == ("all", False)
    for gate in gates:
        gate.clear()
    start()
    assert share.is_alone
    start()
    assert not share.is_alone
    for gate in gates:
        gate.set()
    # the first had all cores before, the second one after, unless the other one ended last
    assert {cores_of_one(), cores_of_one()} <= {"both", "one"}
    executor.close()
    assert not share.is_alone
    share.close()


def test_memory_that_runs_out_is_a_result(run):
    [(_, result)] = run(batch_of(1), runners=[FakeRunner(MemoryError("little"))])

    assert result.failure == "memory"
    assert result.outputs == []


def test_an_error_of_one_batch_is_no_fault_of_the_device(run):
    [(_, result)] = run(batch_of(1), runners=[FakeRunner(ZeroDivisionError("once"))])

    assert result.failure == "batch"


def test_an_error_that_the_smallest_batch_meets_too_lasts(run):
    [(_, result)] = run(batch_of(1), runners=[FakeRunner(RuntimeError("CUDA"), lasts=True)])

    assert result.failure == "model"


def test_too_few_outputs_are_an_error(run):
    [(_, result)] = run(batch_of(1, 2), runners=[FakeRunner(missing=1)])

    assert result.failure == "batch"
    assert result.outputs == []


class TwoSlots(FakeRunner):
    """Has two batches in flight; the first one has ended if it `is_done`."""

    slots = 2
    is_done = False

    def wait(self, timeout):
        return self.is_done or timeout is None


def test_batches_that_run_inline_complete_one_by_one_in_their_order():
    done, runner, clock = [], TwoSlots(), Clock()
    executor = InlineExecutor(runner, clock)
    first, second = batch_of(1), batch_of(2)
    for batch in (first, second):
        executor.start(batch, lambda *completed: done.append(completed))
    assert executor.slots == 2
    # a second for each
    assert executor.free_at() == clock.now + 2.0

    clock.now += 0.5
    assert executor.collect(0.1)
    assert done == []
    clock.now += 1.0
    assert executor.collect(None)
    assert [batch for batch, _ in done] == [first]
    clock.now += 3.0
    runner.is_done = True
    assert executor.collect(0.1)
    assert [batch for batch, _ in done] == [first, second]
    # of the second one, since the first one has ended
    assert [result.seconds for _, result in done] == [1.5, 3.0]


def test_close_waits_for_what_runs():
    gate, done = Event(), []
    executor = ThreadExecutor([FakeRunner(meet=lambda: gate.wait(SECONDS))])
    executor.start(batch_of(1), lambda *completed: done.append(completed))
    gate.set()

    executor.close()

    assert len(done) == 1


def test_a_result_keeps_nothing_of_a_batch_that_ran_out_of_memory(run):
    """The batch's memory must be free before its halves run."""

    class Temporary:
        pass

    kept = []

    def allocate():
        temporary = Temporary()
        kept.append(weakref.ref(temporary))
        raise MemoryError("little")

    gc.disable()
    try:
        run(batch_of(1), runners=[FakeRunner(meet=allocate)])
        assert kept[0]() is None
    finally:
        gc.enable()
