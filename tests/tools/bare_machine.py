"""A Python as on a bare GPU machine: it does not find packages of `make setup`."""

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
# Installed by `make setup`, and not on a machine that has only what torch and pytest need.
ABSENT = (
    "grpc gevent llguidance llvmlite matplotlib numba onnx onnxruntime pytest_asyncio sentence_transformers"
    " tritonclient xdist"
).split()
# Hides modules from a new process, and the pytest plugins among them.
BARE_MACHINE = f"""
import importlib.metadata
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, path=None, target=None: (
    None if name.partition(".")[0] in {ABSENT} else find_spec(name, path, target)
))
distributions = importlib.metadata.distributions
importlib.metadata.distributions = lambda: (
    d for d in distributions() if d.name not in ("pytest-asyncio", "pytest-xdist")
)
"""


def run_on_bare_machine(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return a finished run of Python in the project; `folder` receives a file.

    Options of the pytest and Triton that run this test do not reach it.
    """
    (folder / "sitecustomize.py").write_text(BARE_MACHINE)
    sources = [str(PROJECT / name) for name in ("kernels", "backend", "client", "tools")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=PROJECT,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(folder), *sources])},
        capture_output=True,
        text=True,
        check=False,
    )
