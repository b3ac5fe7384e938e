"""A process whose GPU is lost or hangs says so; a fresh one serves."""

import os
import signal
import subprocess
import sys

import pytest

from tests.checkpoints import save_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SCRIPT = """
import sys
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.costs.model import BatchShape
from varlen.execution.executor import TimedExecutor
from varlen.execution.executor import OverlappingExecutor
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Prompt, Request
from varlen.scheduling.batch import Batch
from varlen.scheduling.batch import RequestState

config = EngineConfig(device="cuda", dtype="fp32", max_batch_tokens=64, max_sequence_tokens=32)
runner = Runner(Checkpoint.open(Path(sys.argv[1])), config)
executor = TimedExecutor(OverlappingExecutor(runner), 4.0)


def failure():
    state = RequestState(Request((Prompt(np.zeros(5, dtype=np.int32)),)), None, 0.0)
    batch, failures = Batch(state.sequences, BatchShape.of([5]), 0.0, ""), SimpleQueue()
    executor.start(batch, lambda _, result: failures.put(result.failure))
    return failures.get()


print(failure())
if sys.argv[2] == "lose":
    # an assertion on the device ends its context, as an illegal access does
    torch.zeros(4, device="cuda")[torch.full((1,), 1 << 20, device="cuda")]
    print(failure(), failure())
if sys.argv[2] == "hang":
    import signal

    # for some minutes
    with runner.state.device.graphs.stream():
        torch.cuda._sleep(1 << 40)
    print(failure(), failure())
    signal.alarm(5)
if executor.close():
    runner.close()
    print("closed")
sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), "BertModel")


@pytest.mark.parametrize(
    "what, printed",
    [
        ("lose", "None model model closed"),
        ("hang", "None model model"),
        ("keep", "None closed"),
    ],
)
def test_a_lost_gpu_stops_the_model_of_its_process_alone(folder, what, printed):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), what],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )

    if what == "hang":
        # by itself, or by the alarm
        assert ran.returncode in (0, -signal.SIGALRM)
    assert ran.stdout.split() == printed.split()
