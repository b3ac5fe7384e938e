"""Gives the processes that run a model the emulated GPU of tests/kernels/triton/fake_cuda.py.

Python imports this module when it starts, from the environment that `emulated_gpu.py` makes for a server, or from
PYTHONPATH. No part of the product imports it.
"""

import os
import sys
from pathlib import Path

# The python backend's process embeds Python; other processes of a model are commands.
_STUB = "triton_python_backend_stub"
_WORKER = "varlen.execution.workers.child"
# Number of GPUs that such a process sees, and the file that says that they are lost.
COUNT, LOST = "VARLEN_TEST_GPUS", "VARLEN_TEST_GPUS_LOST"


def _runs_a_model() -> bool:
    return Path("/proc/self/exe").readlink().name == _STUB or _WORKER in sys.orig_argv


if COUNT in os.environ and _runs_a_model():
    # before the language Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
    # the tests of this tree
    sys.path.append(str(Path(__file__).resolve().parents[3]))

    import numpy as np

    from tests.backend.memory.address_space import FakeSpace
    from tests.kernels.triton.fake_cuda import emulated_gpu
    from tests.kernels.triton.language import patch_once
    from varlen.memory import arena

    # a GPU does not warn about overflow or NaN
    np.seterr(all="ignore")
    patch_once()
    # kept: it lasts as long as the process
    gpus = emulated_gpu(int(os.environ[COUNT]), is_lost=Path(os.environ[LOST]).exists)
    gpus.__enter__()
    arena.CudaMemory = FakeSpace
