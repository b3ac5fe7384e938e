"""Worker processes: answers as in process, and faults that stay in them."""

import os
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from tests.processes import is_gone
from varlen.config import EngineConfig
from varlen.errors import CheckpointError, ConfigError, EngineError
from varlen.execution.executor import WorkerEndedError
from varlen.execution.runner import Runner
from varlen.execution.workers import worker as worker_module
from varlen.execution.workers.messages import Answers, batch_message, batch_of, send_answers
from varlen.execution.workers.process import ModelProcess
from varlen.execution.workers.worker import (
    HungAfter,
    WorkerConnection,
    WorkerProcess,
    Workers,
    load_workers,
)
from varlen.memory.memory_use import MemoryUse
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Prompt, RequestOptions
from varlen.telemetry.metrics import Stats

CONFIG = EngineConfig(device="cpu", dtype="fp32", threads=2, max_batch_tokens=256)
SECONDS = 20.0


def host_of(folder, config=CONFIG):
    return ModelProcess(folder, config, generates=False)


@pytest.fixture(scope="module")
def host(small_bert):
    made = host_of(small_bert)
    yield made
    made.close()


@pytest.fixture
def restarts():
    return []


@pytest.fixture
def worker(host, restarts):
    made = WorkerProcess(host, lambda: restarts.append(1))
    yield made
    made.close()


def test_a_large_message_is_sent_by_the_thread_that_waits_for_it(worker, monkeypatch):
    prompts, options = batch(3, 1)
    expected = run(worker, prompts, options)
    monkeypatch.setattr(worker_module, "_MOST_AT_ONCE", 0)

    wait = launch(worker, prompts, options)

    assert not worker._in_flight[0].is_sent
    np.testing.assert_array_equal(np.stack(wait()), np.stack(expected))


def num_threads(pid):
    return len(list(Path("/proc", str(pid), "task").iterdir()))


def batch(*lengths):
    numbers = np.random.default_rng(0)
    prompts = [Prompt(numbers.integers(0, 50, n, dtype=np.int32)) for n in lengths]
    return prompts, [RequestOptions(normalize=n % 2 == 0) for n in lengths]


def launch(worker, prompts, options):
    return worker.launch(batch_message(prompts, options))


def run(worker, prompts, options):
    return launch(worker, prompts, options)()


def test_answers_are_those_of_a_runner_in_process(worker, host, small_bert):
    runner = Runner(Checkpoint.open(small_bert), CONFIG, workers=2)
    prompts, options = batch(9, 1, 30, 1, 12)

    rows = run(worker, prompts, options)

    for row, expected in zip(rows, runner.run(prompts, options), strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)
    assert host.info == runner.info
    assert worker.use().reserved_bytes > 0


@pytest.mark.full
def test_a_batch_alone_has_the_same_answers_on_all_cores(tmp_path):
    # products with enough work to share from 32 tokens on
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    folder = save_checkpoint(tmp_path / "large", num_hidden_layers=1, **large)
    host = host_of(folder)
    worker = WorkerProcess(host, lambda: None)
    prompts, options = batch(64, 50, 1)
    expected = run(worker, prompts, options)
    threads_before = num_threads(worker.pid)

    host.share.is_on = True
    host.share.set_alone(True)
    rows = run(worker, prompts, options)

    assert num_threads(worker.pid) == threads_before + 1
    for row, one in zip(rows, expected, strict=True):
        assert_close(row, one, roundings=encoder_roundings(folder, torch.float32))
    worker.close()
    host.close()


@pytest.mark.full
def test_a_batch_alone_uses_the_cores_of_workers_that_are_threads(tmp_path):
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    checkpoint = Checkpoint.open(save_checkpoint(tmp_path / "large", num_hidden_layers=1, **large))
    config = EngineConfig(threads=2, device="cpu", dtype="fp32")
    workers = load_workers(checkpoint, config, Stats(), gpu=0, isolated=False)
    runner, _ = workers.runners
    lone = runner.state.device._lone
    prompts, options = batch(64, 50, 1)
    assert lone.count == 1
    expected = runner.run(prompts, options)

    workers.use_all_cores()
    workers.share.set_alone(True)

    assert lone.count == 2
    for row, one in zip(runner.run(prompts, options), expected, strict=True):
        assert_close(row, one, roundings=encoder_roundings(checkpoint.folder, torch.float32))
    workers.close()


@pytest.mark.parametrize("count", [1, 2])
def test_only_batches_of_several_workers_share_cores(host, count):
    workers = Workers(host.info, [object()] * count, host=host, share=host.share)

    workers.use_all_cores()

    assert host.share.is_on == (count > 1)
    host.share.is_on = False


def test_a_worker_that_is_killed_costs_one_retry(worker, restarts, caplog):
    prompts, options = batch(5, 8)
    before = run(worker, prompts, options)
    plans = worker.use().plan_hits + worker.use().plan_misses
    killed = worker.pid
    # it cannot answer before it is killed
    os.kill(killed, signal.SIGSTOP)
    after = []
    waiting = Thread(target=lambda: after.extend(run(worker, prompts, options)))
    waiting.start()
    os.kill(killed, signal.SIGKILL)
    waiting.join(SECONDS)

    np.testing.assert_array_equal(after, before)
    assert restarts == [1]
    assert worker.pid != killed
    # totals never fall
    assert worker.use().plan_hits + worker.use().plan_misses > plans
    assert f"worker process {killed} ended with code -9" in caplog.text


def test_an_idle_worker_that_is_killed_is_replaced_by_the_next_batch(worker, restarts):
    os.kill(worker.pid, signal.SIGKILL)
    assert is_gone(worker.pid)

    worker.check()

    assert restarts == [1]


def test_an_error_in_a_worker_is_raised_with_its_traceback(worker, restarts):
    prompts, options = batch(300)

    with pytest.raises(EngineError, match="a batch of 300 tokens; the arena holds 256"):
        run(worker, prompts, options)

    worker.check()
    assert restarts == []


@pytest.mark.full
def test_the_model_is_loaded_again_if_its_host_was_killed(small_bert):
    host = host_of(small_bert)
    worker = WorkerProcess(host, lambda: None)
    prompts, options = batch(4)
    before = run(worker, prompts, options)
    for pid in (host.pid, worker.pid):
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid)

    after = run(worker, prompts, options)

    np.testing.assert_array_equal(after, before)
    pids = host.pid, worker.pid
    worker.close()
    host.close()
    assert all(map(is_gone, pids))


class FakeHost:
    """Starts workers that are threads.

    Each has a list of its answers: it reads a batch before each of them, and ends at a None or after the last one.

    Attributes:
        received: lengths of the prompts of each batch, for each worker.
    """

    config = CONFIG
    info = SimpleNamespace(adapters=())

    def __init__(self, *answers):
        self.answers = [each if isinstance(each, list) else [each] for each in answers]
        self.received = []

    def connect(self, ended=None, reason=""):
        del ended, reason
        ours, theirs = Pipe()
        answers = self.answers.pop(0)
        self.received.append([])

        def work(received=self.received[-1]):
            for answer in answers:
                try:
                    prompts, _ = batch_of(theirs.recv_bytes())
                except EOFError:
                    # it was closed
                    break
                received.append([prompt.num_tokens for prompt in prompts])
                if answer is None:
                    break
                send_answers(theirs, answer)
            theirs.close()

        Thread(target=work, daemon=True).start()
        return ours, len(self.answers), ()


GOOD = Answers([np.ones(3, dtype=np.float32)], MemoryUse())


def test_a_batch_that_ends_two_workers_fails_and_the_next_one_runs():
    restarts = []
    worker = WorkerProcess(FakeHost(None, None, GOOD), lambda: restarts.append(1))

    with pytest.raises(EngineError, match="2 worker processes ended"):
        run(worker, *batch(3))

    assert len(run(worker, *batch(3))) == 1
    assert restarts == [1, 1]


def test_a_next_worker_that_cannot_be_set_up_runs_nothing():
    failures = [OSError("cannot be mapped")]

    def restarted():
        if failures:
            raise failures.pop()

    host = FakeHost(None, GOOD, GOOD)
    worker = WorkerProcess(host, restarted, has_state=True)

    with pytest.raises(OSError, match="cannot be mapped"):
        run(worker, *batch(3))
    with pytest.raises(WorkerEndedError):
        run(worker, *batch(4))

    assert len(run(worker, *batch(5))) == 1
    # the one that was not set up got no batch
    assert host.received == [[[3]], [], [[5]]]


def answers_of(*numbers):
    return [Answers([np.full(3, number, np.float32)], MemoryUse()) for number in numbers]


def test_batches_in_flight_are_answered_in_their_order():
    host = FakeHost(answers_of(1, 2, 3))
    worker = WorkerProcess(host, lambda: None, slots=3)

    waits = [launch(worker, *batch(length)) for length in (5, 6, 7)]

    # the second one is asked for first
    assert [waits[i]()[0][0] for i in (1, 0, 2)] == [2, 1, 3]
    assert host.received == [[[5], [6], [7]]]


def test_batches_that_a_worker_has_lost_run_again_one_by_one():
    # the second batch ends two workers; the others are answered, each once
    host = FakeHost([*answers_of(1), None], [None], answers_of(3, 4, 5))
    restarts = []
    worker = WorkerProcess(host, lambda: restarts.append(1), slots=3)
    waits = [launch(worker, *batch(length)) for length in (5, 6, 7)]

    assert waits[0]()[0][0] == 1
    later = launch(worker, *batch(8))
    with pytest.raises(EngineError, match="2 worker processes ended"):
        waits[1]()
    assert [wait()[0][0] for wait in (waits[2], later)] == [3, 4]
    assert run(worker, *batch(9))[0][0] == 5

    # nothing was sent to a worker beside a batch that may end it
    assert host.received == [[[5], [6]], [[6]], [[7], [8], [9]]]
    assert restarts == [1, 1]


def test_a_check_keeps_the_answers_of_batches_in_flight():
    host = FakeHost([*answers_of(1), Answers((), MemoryUse(), "error", "trace"), *answers_of(3, 4)])
    worker = WorkerProcess(host, lambda: None, slots=3)
    waits = [launch(worker, *batch(length)) for length in (5, 6, 7)]
    assert waits[0]()[0][0] == 1

    with pytest.raises(EngineError, match="trace"):
        waits[1]()
    worker.check()

    assert waits[2]()[0][0] == 3


def test_too_little_memory_in_a_worker_is_a_memory_error():
    worker = WorkerProcess(FakeHost(Answers((), MemoryUse(), "memory")), lambda: None)

    with pytest.raises(MemoryError):
        run(worker, *batch(3))


def test_an_answer_that_was_not_read_is_not_that_of_the_next_batch(worker, restarts, monkeypatch):
    one, two = batch(5, 8), batch(7, 6)
    expected = run(worker, *two)

    def too_little_memory(connection):
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr(worker_module, "receive_answers", too_little_memory)
        with pytest.raises(MemoryError):
            run(worker, *one)

    np.testing.assert_array_equal(run(worker, *two), expected)
    assert restarts == [1]


def test_a_worker_that_hangs_is_ended_and_replaced(worker, restarts):
    expected = run(worker, *batch(3))
    connection = worker._worker
    connection._hung_after = HungAfter(seconds=2.0)
    connection._take(connection._connection, worker.pid)
    os.kill(worker.pid, signal.SIGSTOP)

    np.testing.assert_array_equal(run(worker, *batch(3)), expected)
    assert restarts == [1]


def test_what_a_worker_has_answered_before_it_ended_is_not_lost():
    ours, theirs = Pipe()
    worker = WorkerConnection(ours, 1, HungAfter())
    worker.send(b"first")
    send_answers(theirs, Answers([np.ones(3, np.float32)], MemoryUse()))
    theirs.close()

    with pytest.raises(WorkerEndedError):
        worker.send(b"second")

    assert worker.receive()[0].tolist() == [1, 1, 1]
    with pytest.raises(WorkerEndedError):
        worker.receive()


def test_a_worker_that_hangs_in_the_midst_of_an_answer_is_ended():
    ours, theirs = Pipe()
    with subprocess.Popen(["sleep", "600"]) as process:
        worker = WorkerConnection(ours, process.pid, HungAfter(seconds=1))
        # the length of a message, and not all of it
        os.write(theirs.fileno(), struct.pack("!i", 100) + b"{")

        with pytest.raises(WorkerEndedError, match="did not answer within 1 s"):
            worker.receive()

        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.full
def test_a_checkpoint_that_has_changed_is_not_loaded_again(small_bert, tmp_path):
    folder = tmp_path / "changing"
    shutil.copytree(small_bert, folder)
    host = host_of(folder)
    worker = WorkerProcess(host, lambda: None)
    (folder / "config.json").touch()
    for pid in (host.pid, worker.pid):
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid)

    with pytest.raises(EngineError, match="the files of the checkpoint have changed; reload"):
        run(worker, *batch(3))

    worker.close()
    host.close()


def test_a_model_loaded_again_may_differ_in_measured_choices_and_not_in_limits(host, monkeypatch):
    measured = replace(host.info, cost_fields={"int8": "another product"}, weight_bytes=1)
    monkeypatch.setattr(host, "_load", lambda: measured)
    host._load_again("")

    ended = []
    monkeypatch.setattr(host._process, "end", lambda: ended.append(1))
    for limit in ("max_batch_tokens", "max_arena_tokens"):
        less = replace(host.info, **{limit: 1})
        monkeypatch.setattr(host, "_load", lambda less=less: less)
        with pytest.raises(EngineError, match="the cores or the memory have changed"):
            host._load_again("")
    assert len(ended) == 2


def test_signals_to_all_processes_of_a_server_end_no_worker(worker, host, restarts):
    for pid in (host.pid, worker.pid):
        os.kill(pid, signal.SIGTERM)

    worker.check()

    assert restarts == []


@pytest.mark.full
def test_errors_of_a_load_are_raised_here(small_bert, tmp_path):
    with pytest.raises(ConfigError, match="arena_bytes allows 5 bytes for each of 2 workers"):
        host_of(small_bert, replace(CONFIG, arena_bytes=10))
    with pytest.raises(CheckpointError):
        host_of(tmp_path)


ORPHANS = """
import os, signal, sys
from varlen.config import EngineConfig
from varlen.telemetry.metrics import Stats
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service

config = EngineConfig(device="cpu", threads=1, warmup_seconds=0)
workers = Service.load(EncoderParts, sys.argv[1], config, Stats(), isolated=True).model.workers
(worker,) = workers.runners
print(workers.host.pid, worker.pid, "torch" in sys.modules, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_host_and_workers_end_with_the_service_which_needs_no_torch(small_bert):
    ran = subprocess.run(
        [sys.executable, "-c", ORPHANS, str(small_bert)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )

    host, worker, has_torch = ran.stdout.split()
    assert has_torch == "False"
    assert is_gone(host)
    assert is_gone(worker)
