"""The CPU path does not import Triton, which may be missing without a GPU."""

import subprocess
import sys

import pytest

BLOCKED = "import sys; sys.modules['triton'] = None\n"


@pytest.mark.parametrize(
    "program",
    [
        "import varlen_kernels.reference",
        "import varlen.execution.runner, varlen.service.service",
        "import varlen_client.cli.main",
        "import torch; from varlen_kernels.ops import kernels_for\n"
        "assert kernels_for(torch.device('cpu')).__name__ == 'varlen_kernels.cpu'",
    ],
    ids=["reference", "backend", "client", "dispatch"],
)
def test_the_cpu_path_does_not_import_triton(program: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED + program], capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr
