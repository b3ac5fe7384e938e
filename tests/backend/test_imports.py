"""What an import brings along: one Python without Triton imports all, the lightest first."""

import os
import subprocess
import sys
from pathlib import Path

FAKES = Path(__file__).parent / "fakes"
# What is imported, and a module that is still missing then. Without a GPU, Triton may be missing.
IMPORTS = {
    "varlen_client.cli.main": "varlen",
    "varlen": "torch",
    # the entry point of the server
    "varlen.model": "torch",
    # what a worker runs whose ops are all compiled
    "varlen.execution.workers.child": "torch",
    "varlen.execution.workers.compiled_work": "torch",
    "varlen_kernels.cpu.calls.machine_code": "torch",
    "varlen_kernels.cpu": "torch",
    "varlen_kernels.reference": "",
    "varlen.execution.runner": "",
    "varlen.service.service": "",
    "varlen_kernels.cpu.every_op": "",
}
PROGRAM = """
import importlib, sys
sys.modules["triton"] = None
for name, missing in IMPORTS.items():
    importlib.import_module(name)
    assert missing not in sys.modules, f"{name} imports {missing}"
import torch
from varlen_kernels.ops import kernels_for
assert kernels_for(torch.device("cpu")).__name__ == "varlen_kernels.cpu"
"""


def test_imports_bring_along_no_torch_and_need_no_triton():
    run(FAKES, f"IMPORTS = {IMPORTS}{PROGRAM}")


def test_importing_the_entry_needs_no_class_of_the_server(tmp_path):
    # while the file is imported, the real module is still empty
    (tmp_path / "triton_python_backend_utils.py").write_text("")

    run(tmp_path, "import varlen.model")


def run(folder, program):
    """Run a program in a new process, with the server's module in `folder`."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
