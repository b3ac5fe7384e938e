"""The engine's connection to a worker process."""

import os
import signal
import struct
import subprocess
from multiprocessing.connection import Pipe

import numpy as np
import pytest

from varlen.config import EngineConfig
from varlen.execution.executor import WorkerEndedError
from varlen.execution.workers.connection import (
    HungAfter,
    WorkerConnection,
    hung_after,
    longest_wait,
)
from varlen.execution.workers.messages import Answers, send_answers
from varlen.memory.memory_use import MemoryUse


@pytest.mark.parametrize("stages", [2, 5, 64])
def test_a_leader_that_waits_for_a_lost_stage_is_not_hung(stages):
    config = EngineConfig(device="cpu", pipeline_parallel=stages, rank_timeout_seconds=10)

    # the last stage, which leads, waits longest, and then reports the lost one
    assert hung_after(config).seconds > longest_wait(config, stages - 1) + 1


def test_each_stage_has_the_time_of_the_setting():
    config = EngineConfig(device="cpu", pipeline_parallel=4, rank_timeout_seconds=10)

    limits = [longest_wait(config, before) for before in (1, 2, 3)]

    # a stage waits for all before it, and reports before the one behind it does
    assert [limit // 10 for limit in limits] == [1, 2, 3]
    assert limits == sorted(set(limits))


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
