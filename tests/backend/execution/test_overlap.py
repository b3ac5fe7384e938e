"""Batches on a GPU that has the next one early, on a virtual clock.

Engine, scheduler, executor, packing and answers are real. Only the GPU's time is not, and it repeats what it was given.
"""

import math
import random
from copy import copy
from dataclasses import replace
from queue import Empty
from threading import Thread

import numpy as np
import pytest
import torch

from tests.repeated_work import RepeatedWork
from varlen.config import EngineConfig
from varlen.costs.model import BatchShape
from varlen.errors import EngineError, ModelFaultError
from varlen.execution import arenas, device
from varlen.execution import runner as runner_module
from varlen.execution import warm_up as warm_up_module
from varlen.execution.cuda.graphs import Buckets
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.executor import OverlappingExecutor, TimedExecutor
from varlen.execution.model_state import OneShot
from varlen.execution.packing import largest_dims
from varlen.execution.workers.worker import Workers, load_workers
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Request
from varlen.scheduling.batch import Batch, RequestState
from varlen.service import one_shot
from varlen.service.costs import warm_up
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.telemetry.metrics import SnapshotMetric, Stats
from varlen_kernels import reference

from ..fakes.engine_parts import Clock, FakeReply
from ..fakes.gpu_model import COPY, MAX_TOKENS, NORMALIZED, PACK, RUN, GpuModel
from ..fakes.virtual_gpu import SECONDS, VirtualGpu
from ..requests import random_prompts

CPU = torch.device("cpu")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def gpu(clock):
    return VirtualGpu(clock, run_seconds=RUN, copy_seconds=COPY)


@pytest.fixture
def state(runner, gpu):
    arena = Arena(Layout(runner.program.buffers, 256), largest_dims(MAX_TOKENS), CPU)
    made = OneShot(CudaRunner(runner.program, reference, arena, gpu))
    # its graphs, which were timed
    gpu.ran.clear()
    return made


@pytest.fixture
def model(state, gpu):
    """Return a function that makes a model, and closes it after the test."""
    made = []

    def make(**settings):
        made.append(GpuModel(state, gpu, **settings))
        return made[-1]

    yield make
    for each in made:
        each.executor.close()


def gaps_of(gpu):
    """Return the times in which the GPU ran nothing between two pieces of work."""
    pairs = zip(gpu.ran, gpu.ran[1:], strict=False)
    return [(end, begin) for (_, end), (begin, _) in pairs if begin - end > 1e-9]


def assert_answers(model, runner, requests):
    for prompts, reply in zip(requests, model.replies, strict=True):
        assert reply.end == "finished"
        expected = runner.run(prompts, [NORMALIZED] * len(prompts))
        for row, answer in enumerate(expected):
            np.testing.assert_allclose(reply.outputs[row][0], answer, rtol=1e-5, atol=1e-6)


def test_a_gpu_with_work_is_never_idle(model, gpu, runner):
    made = model()
    chance = random.Random(0)
    requests = [made.submit(chance.randint(1, 30), seed=n) for n in range(40)]

    made.play()

    assert len(made.launcher.batches) > 10
    assert gaps_of(gpu) == []
    assert_answers(made, runner, requests)


def test_with_one_slot_it_would_be_idle_while_each_batch_is_packed(model, gpu):
    made = model(slots=1)
    for n in range(20):
        made.submit(20, seed=n)

    made.play()

    lost = [end - begin for begin, end in gaps_of(gpu)]
    assert lost == pytest.approx([PACK] * (len(made.launcher.batches) - 1))


@pytest.mark.parametrize("seed", range(5))
def test_a_gpu_is_idle_only_until_the_next_request_is_packed(model, gpu, runner, seed):
    made, chance = model(), random.Random(seed)
    requests, arrived, arrivals = [], {}, []
    at = made.clock.now

    def arrive(n):
        requests.append(made.submit(chance.randint(1, 20), seed=n))
        arrived[id(requests[-1][0])] = made.clock.now

    for n in range(40):
        # gaps, singles and bursts
        at += chance.choice([0.0, 0.0, chance.expovariate(1 / RUN), 5 * RUN])
        arrivals.append((at, lambda n=n: arrive(n)))
    made.play(arrivals)

    begins = [begin for begin, end in gpu.ran if end - begin == pytest.approx(COPY)][::2]
    assert len(begins) == len(made.launcher.batches)
    ends = dict(zip(begins[1:], (end for _, end in gpu.ran[2::3]), strict=False))
    for begin, batch in list(zip(begins, made.launcher.batches, strict=True))[1:]:
        oldest = min(arrived[id(each.prompt)] for each in batch.sequences)
        # a request that comes while another batch is packed waits for that
        assert begin <= max(ends[begin], oldest + 2 * PACK) + 1e-9
    assert_answers(made, runner, requests)


def test_the_next_batch_is_chosen_late_so_that_requests_join_it(model, gpu):
    made = model()
    # the time to start a batch is known after the first one
    made.submit(1)
    made.play()
    began = made.clock.now

    made.submit(20)
    early = [
        (began + 0.2 * RUN, lambda: made.submit(5)),
        (began + 0.4 * RUN, lambda: made.submit(6)),
    ]
    made.play(early)

    assert [batch.shape.sequences for batch in made.launcher.batches] == [1, 1, 2]
    # and still in time
    assert len(gaps_of(gpu)) == 1


def test_costs_that_are_too_high_leave_the_gpu_idle_for_one_batch_s_packing_at_most(model, gpu):
    made = model(seconds=3 * RUN)
    for n in range(30):
        made.submit(25, seed=n)

    made.play()

    assert all(end - begin <= PACK + 1e-9 for begin, end in gaps_of(gpu))


def test_seconds_are_those_in_which_a_batch_ran_alone(model):
    made, seconds = model(), []
    update = made.engine._scheduler.update
    made.engine._scheduler.update = lambda b, r: (seconds.append(r.seconds), update(b, r))[1]
    for n in range(8):
        made.submit(25, seed=n)

    made.play()

    # the first one could not be packed while another one ran
    assert seconds == pytest.approx([PACK + RUN + 2 * COPY] + [RUN + 2 * COPY] * 7)


@pytest.mark.parametrize("seed", range(8))
def test_buffers_are_overwritten_only_after_they_were_read(runner, state, gpu, seed):
    """Batches start, run and are read in any allowed order."""
    chance, waiting, done = random.Random(seed), [], 0
    while done < 25:
        choice = chance.random()
        if choice < 0.4 and len(waiting) < CudaRunner.slots:
            lengths = [chance.randint(1, 8) for _ in range(chance.randint(1, 4))]
            batch = random_prompts(lengths, seed=chance.randint(0, 1000), types=2)
            waiting.append((batch, state.launch(batch, [NORMALIZED] * len(batch))))
        elif choice < 0.8:
            # late: a copy reads what is in its source only now
            gpu.run_next()
        elif waiting and not gpu._queue:
            batch, answers = waiting.pop(chance.randrange(len(waiting)))
            for mine, right in zip(
                answers(), runner.run(batch, [NORMALIZED] * len(batch)), strict=True
            ):
                np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)
            done += 1


def test_a_third_batch_waits_until_the_answers_of_one_were_read(state, gpu):
    batch, options = random_prompts([3]), [NORMALIZED]
    first, _ = (state.launch(batch, options) for _ in range(2))
    third = Thread(target=state.launch, args=(batch, options), daemon=True)
    third.start()
    while gpu.run_next():
        pass
    third.join(0.05)
    assert third.is_alive()

    first()

    third.join(SECONDS)
    assert not third.is_alive()


def illegal_access():
    return torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("when", ["starting", "running"])
def test_a_batch_that_fails_fails_its_requests_only(model, gpu, runner, when, seed):
    made, chance = model(), random.Random(seed)
    faults = [
        (when, ZeroDivisionError("once")) if chance.random() < 0.3 else None for _ in range(60)
    ]
    gpu.faults.extend(faults)
    requests = [
        made.submit(*(chance.randint(1, 15) for _ in range(chance.randint(1, 3))), seed=n)
        for n in range(25)
    ]

    made.play()

    failed = {
        id(each.request.reply)
        for batch, fault in zip(made.launcher.batches, faults, strict=False)
        if fault
        for each in batch.sequences
    }
    assert failed
    assert {id(r) for r in made.replies if r.end != "finished"} == failed
    for prompts, reply in zip(requests, made.replies, strict=True):
        if reply.end == "finished":
            for row, answer in enumerate(runner.run(prompts, [NORMALIZED] * len(prompts))):
                np.testing.assert_allclose(reply.outputs[row][0], answer, rtol=1e-5, atol=1e-6)
        else:
            assert isinstance(reply.end, EngineError)
    assert made.engine._refusal is None


def test_a_lost_gpu_stops_the_model_and_answers_everything_with_one_error(model, gpu, caplog):
    made = model()
    for n in range(12):
        made.submit(25, seed=n)

    def lose():
        gpu.lost = illegal_access()

    made.play([(made.clock.now + 3.5 * RUN, lose)])

    ends = [reply.end for reply in made.replies]
    answered = ends.count("finished")
    assert 0 < answered < 12
    errors = [end for end in ends if end != "finished"]
    assert all(isinstance(error, ModelFaultError) for error in errors)
    assert {str(error) for error in errors} == {
        "the model has stopped after a fault of its device or workers and cannot run requests; reload it"
    }
    # the cause is in the log, for the operator
    assert "an illegal memory access was encountered" in caplog.text
    with pytest.raises(ModelFaultError, match="reload it"):
        made.submit(3)


def test_a_thread_of_the_engine_answers_each_request_once_whatever_fails(runner, clock):
    """Each fifth batch fails, and at last the GPU is lost."""

    class Failing(VirtualGpu):
        def record(self):
            wait = super().record()
            self.run_until(math.inf)
            return wait

    gpu = Failing(clock)
    arena = Arena(Layout(runner.program.buffers, 256), largest_dims(MAX_TOKENS), CPU)
    made = GpuModel(OneShot(CudaRunner(runner.program, reference, arena, gpu)), gpu)
    gpu.faults.extend(
        ("running" if n % 2 else "starting", OSError(n)) if n % 5 == 0 else None for n in range(30)
    )
    made.engine.start()
    for n in range(60):
        try:
            made.submit(*[1 + n % 30] * (1 + n % 2), seed=n)
        except ModelFaultError:
            made.replies.pop()
        if n == 50:
            gpu.lost = illegal_access()

    made.engine.close()
    made.executor.close()

    assert not made.engine.is_ready
    # a reply fails if it is answered twice
    assert all(reply.end is not None for reply in made.replies)
    with pytest.raises(Empty):
        made.engine._inbox.get(block=False)


@pytest.fixture
def overlapping(runner):
    """Return workers as of a GPU, which is the CPU."""
    other = copy(runner)
    arena = Arena(Layout(runner.program.buffers, 256), largest_dims(512, 16), CPU)
    graphs = CudaRunner(runner.program, reference, arena, RepeatedWork())
    other.state = OneShot(graphs)
    other.launch_batch = other.state.launch_batch
    other.slots = CudaRunner.slots
    info = replace(runner.info, max_batch_tokens=512, workers=1)
    return Workers(info, [other], launcher=other, graphs=graphs.graph_use)


def test_a_launched_batch_gives_the_answers_of_one_that_runs(overlapping, runner):
    prompts = random_prompts([5, 9, 2], types=2)
    state = RequestState(Request(tuple(prompts), NORMALIZED), None, 0.0)
    batch = Batch(state.sequences, BatchShape.of([5, 9, 2]), 0.0, "")

    answers = overlapping.launcher.launch_batch(batch)()

    for mine, right in zip(answers, runner.run(prompts, [NORMALIZED] * 3), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)


def test_a_batch_that_is_measured_runs_alone(overlapping):
    executor = overlapping.new_executor()
    graphs = overlapping.runners[0].state.device.graphs
    timed = graphs.replayed

    warm_up(overlapping.info, executor, EngineConfig())

    executor.close()
    assert executor.slots == 2
    assert graphs.replayed == timed + 1


def test_a_service_on_a_gpu_gives_the_answers_of_the_cpu(
    overlapping, runner, small_bert, monkeypatch, tmp_path
):
    monkeypatch.setattr(one_shot, "load_workers", lambda *args, **kwargs: overlapping)
    config = EngineConfig(
        device="cpu", max_batch_sequences=16, warmup_seconds=1, cache_folder=str(tmp_path)
    )
    loaded = Service.load(EncoderParts, small_bert, config, Stats())
    batches = [tuple(random_prompts([1 + n % 20, 7], seed=n, types=2)) for n in range(30)]
    replies = [FakeReply() for _ in batches]

    for prompts, reply in zip(batches, replies, strict=True):
        loaded.model.submit(Request(prompts, NORMALIZED), reply)
    snapshot = loaded.snapshot()
    loaded.close()

    for prompts, reply in zip(batches, replies, strict=True):
        for row, answer in enumerate(runner.run(prompts, [NORMALIZED] * 2)):
            np.testing.assert_allclose(reply.outputs[row][0], answer, rtol=1e-5, atol=1e-6)
    # one batch runs at a time, although two are in flight
    assert loaded.admission.slots == 1
    count = len(list(Buckets(512, 16)))
    assert snapshot[SnapshotMetric.GRAPHS] == count
    assert snapshot[SnapshotMetric.GRAPH_BYTES] == count * 1_000_000
    assert snapshot[SnapshotMetric.GRAPH_SECONDS] > 0.0


def test_a_model_on_a_gpu_has_one_worker_that_overlaps_batches(small_bert, monkeypatch):
    gpu = torch.device("cuda", 1)

    class GpuRunner:
        slots, info, graph_use = 2, "info", "graphs"

        def __init__(self, checkpoint, config, *, gpu):
            assert gpu == 1

    monkeypatch.setattr(device, "choose_device", lambda name, index: gpu)
    monkeypatch.setattr(runner_module, "Runner", GpuRunner)
    checked = []
    monkeypatch.setattr(warm_up_module, "check_numbers", lambda *each: checked.append(each))
    config = EngineConfig(device="cuda")

    workers = load_workers(Checkpoint.open(small_bert), config, Stats(), gpu=1, isolated=True)

    assert workers.runners == [workers.launcher]
    assert checked == [(workers.launcher, config.device_timeout_seconds)]
    assert (workers.info, workers.graphs, workers.host) == ("info", "graphs", None)
    executor = workers.new_executor()
    executor.close()
    assert isinstance(executor, TimedExecutor)
    assert isinstance(executor._executor, OverlappingExecutor)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 64),
        ({"max_batch_sequences": 7}, 7),
        ({"policy": "none"}, 64),
        ({"policy": "token_budget"}, None),
    ],
    ids=str,
)
def test_a_graph_has_room_for_every_batch_of_a_policy_and_not_for_more(settings, most):
    assert arenas.most_sequences(EngineConfig(**settings)) == most
