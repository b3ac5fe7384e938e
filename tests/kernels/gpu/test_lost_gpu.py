"""A process that has lost its GPU says so, and a fresh one serves."""

import os
import subprocess
import sys

import pytest

from tests.checkpoints import save_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SCRIPT = """
import sys
from pathlib import Path

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.execution.overlap import OverlappingExecutor
from varlen.execution.runner import Runner
from varlen.models.checkpoint import Checkpoint
from varlen.request import Prompt, Request
from varlen.sequence import Batch, RequestState

config = EngineConfig(device="cuda", dtype="fp32", max_batch_tokens=64, max_sequence_tokens=32)
runner = Runner(Checkpoint.open(Path(sys.argv[1])), config)
executor = OverlappingExecutor(runner)


def failure():
    state = RequestState(Request((Prompt(np.zeros(5, dtype=np.int32)),)), None, 0.0)
    (result,) = executor.run_on_all(Batch(state.sequences, BatchShape.of([5]), 0.0, ""))
    return result.failure


print(failure())
if sys.argv[2] == "lose":
    # an assertion on the device ends its context, as an illegal access does
    torch.zeros(4, device="cuda")[torch.full((1,), 1 << 20, device="cuda")]
    print(failure(), failure())
executor.close()
runner.close()
print("closed", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), "BertModel")


@pytest.mark.parametrize(
    "what, printed", [("lose", "None model model closed"), ("keep", "None closed")]
)
def test_a_lost_gpu_stops_the_model_of_its_process_alone(folder, what, printed):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), what],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )

    assert ran.stdout.split() == printed.split()
