"""A GPU that never ends a batch, on a virtual clock.

Engine, scheduler, executors, packing and answers are real; only the GPU and its time are not.
"""

import random
from dataclasses import replace
from queue import SimpleQueue
from threading import Event

import pytest
import torch

from tests.backend.fakes.engine_parts import Clock, FakeReply
from tests.backend.fakes.gpu_model import COPY, MAX_TOKENS, NORMALIZED, RUN, GpuModel
from tests.backend.fakes.virtual_gpu import SECONDS, VirtualGpu
from tests.backend.requests import random_prompts
from varlen.config import EngineConfig
from varlen.costs.model import BatchShape
from varlen.errors import EngineError, ModelFaultError
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.executor import CHECKS, TimedExecutor
from varlen.execution.model_state import OneShot
from varlen.execution.packing import largest_dims
from varlen.execution.thread_executor import ThreadExecutor
from varlen.execution.workers.worker import Workers
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.request.request import Request
from varlen.scheduling.batch import Batch, BatchResult, RequestState
from varlen.service import one_shot
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats
from varlen_kernels import reference

# Longer than any test, so that only tests check the time; on the virtual clock it is the limit.
LIMIT = 1e6


@pytest.fixture
def gpu():
    return VirtualGpu(Clock(), run_seconds=RUN, copy_seconds=COPY)


@pytest.fixture
def model(runner, gpu):
    arena = Arena(
        Layout(runner.program.buffers, 256), largest_dims(MAX_TOKENS), torch.device("cpu")
    )
    made = GpuModel(OneShot(CudaRunner(runner.program, reference, arena, gpu)), gpu, timeout=LIMIT)
    yield made
    # threads that wait for the GPU would wait until the test's own limit
    while gpu.run_next():
        pass
    made.executor.close()


def checks(model, count=2 * CHECKS + 2):
    """Return the regular checks of the time, as arrivals on the virtual clock."""
    began = model.clock.now
    return [(began + n * LIMIT / CHECKS, model.executor.check) for n in range(1, count)]


def hang(gpu):
    gpu.hung = True


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 6))]
)
def test_a_hung_gpu_stops_the_model_and_each_request_gets_one_error(model, gpu, seed, caplog):
    chance = random.Random(seed)
    for n in range(20):
        model.submit(*(chance.randint(1, 15) for _ in range(chance.randint(1, 3))), seed=n)
    began = model.clock.now

    model.play([(began + chance.random() * 8 * RUN, lambda: hang(gpu)), *checks(model)])

    ends = [reply.end for reply in model.replies]
    errors = [end for end in ends if end != "finished"]
    assert errors
    assert all(isinstance(error, ModelFaultError) for error in errors)
    # what ended before keeps its answer
    assert ends.index(errors[0]) == 0 or ends[0] == "finished"
    assert "no batch has ended on the device" in caplog.text
    with pytest.raises(ModelFaultError, match="reload it"):
        model.submit(3)


def test_requests_fail_after_the_time_limit_and_not_before(model, gpu):
    hang(gpu)
    model.submit(5)
    began = model.clock.now

    model.play(checks(model, CHECKS + 1))
    assert model.replies[0].end is None

    model.play([(began + (CHECKS + 1) * LIMIT / CHECKS, model.executor.check)])
    assert isinstance(model.replies[0].end, ModelFaultError)
    assert model.clock.now - began < 1.2 * LIMIT


def test_a_batch_that_ends_after_all_is_not_delivered_again(model, gpu):
    hang(gpu)
    model.submit(20)
    model.submit(20)
    model.play(checks(model))
    ends = [reply.end for reply in model.replies]

    while gpu.run_next():
        pass
    # until the thread that waited for the GPU has ended both batches
    assert model.executor._executor.close()
    model.engine.step()

    assert [reply.end for reply in model.replies] == ends
    assert model.engine._in_flight == 0


def test_slow_batches_that_end_do_not_count_as_hung(model, gpu):
    gpu.run_seconds = 0.7 * LIMIT
    for n in range(5):
        model.submit(25, seed=n)

    # five batches, each nearly as long as the limit, and two in flight
    model.play(checks(model, 8 * CHECKS))

    assert [reply.end for reply in model.replies] == ["finished"] * 5


def test_an_idle_gpu_does_not_count_as_hung(model):
    model.play(checks(model))

    model.submit(5)
    model.play(checks(model))

    assert model.replies[0].end == "finished"


def test_after_a_hang_the_model_closes_without_waiting_for_the_gpu(model, gpu):
    hang(gpu)
    model.submit(5)
    model.play(checks(model))

    assert model.executor.close() is False


class HungRunner:
    """A runner whose batches end when the test says so."""

    def __init__(self):
        self.running, self.end = Event(), Event()

    def launch_batch(self, batch):
        return lambda: self.run_batch(batch)

    def run_batch(self, batch):
        self.running.set()
        assert self.end.wait(SECONDS)
        return [[0.0] for _ in batch.sequences]

    def check(self):
        pass


@pytest.fixture
def hung():
    runner = HungRunner()
    yield runner
    runner.end.set()


def batch_of(*lengths):
    state = RequestState(Request(tuple(random_prompts(lengths)), NORMALIZED), None, 0.0)
    return Batch(state.sequences, BatchShape.of(lengths), 0.0, "")


def result_of(executor):
    """Return the result of a batch."""
    results: SimpleQueue[BatchResult] = SimpleQueue()
    executor.start(batch_of(3), lambda _, result: results.put(result))
    return results.get(timeout=SECONDS)


def test_the_thread_of_the_executor_checks_the_time(hung):
    executor = TimedExecutor(ThreadExecutor([hung]), 0.05)

    result = result_of(executor)

    assert (result.failure, result.outputs) == ("model", [])
    assert executor.close() is False


def test_batches_that_start_after_a_hang_fail_at_once(hung):
    executor = TimedExecutor(ThreadExecutor([hung]), 0.05)
    result_of(executor)

    result = result_of(executor)

    assert result.failure == "model"


def test_an_executor_closes_only_after_the_last_batch_has_ended(hung):
    executor = TimedExecutor(ThreadExecutor([hung]), LIMIT)
    results: SimpleQueue[BatchResult] = SimpleQueue()
    executor.start(batch_of(3), lambda _, result: results.put(result))
    assert hung.running.wait(SECONDS)
    hung.end.set()

    assert executor.close()
    assert results.get(block=False).failure is None


class HungLauncher(HungRunner):
    """The only worker of a GPU, which hangs from a batch on."""

    slots = 2

    def __init__(self, runner, batches):
        super().__init__()
        self.runner, self.batches, self.closed = runner, batches, False

    def launch_batch(self, batch):
        self.batches -= 1
        if self.batches < 0:
            return lambda: self.run_batch(batch)
        return lambda: self.runner.run_batch(batch)

    def close(self):
        self.closed = True


@pytest.mark.parametrize("batches, timeout", [(1, 3.0), (0, 0.1)], ids=["serving", "loading"])
def test_a_service_whose_gpu_hangs_is_not_ready_and_releases_nothing(
    runner, small_bert, monkeypatch, batches, timeout
):
    launcher = HungLauncher(runner, batches)
    info = replace(runner.info, workers=1)
    workers = Workers(info, [launcher], launcher=launcher, device_timeout=timeout)
    monkeypatch.setattr(one_shot, "load_workers", lambda *args, **kwargs: workers)
    config = EngineConfig(device="cpu", warmup_seconds=0)
    reply = FakeReply()

    if batches:
        loaded = Service.load(EncoderParts, small_bert, config, Stats())
        loaded.model.submit(Request(tuple(random_prompts([5], types=2)), NORMALIZED), reply)
        assert reply.answered.wait(SECONDS)
        assert isinstance(reply.end, ModelFaultError)
        assert not loaded.is_ready
        assert loaded.close() is False
    else:
        with pytest.raises(EngineError, match="first batches"):
            Service.load(EncoderParts, small_bert, config, Stats())

    # the GPU may still write to its memory
    assert not launcher.closed
    launcher.end.set()
