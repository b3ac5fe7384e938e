"""Run the tests that need a CUDA GPU: `python -m varlen_bench.gpu_tests [pytest's arguments]`.

The machine may be a bare one: without pytest-asyncio, pytest-xdist or a server's client. Tests run in as many
processes as there are CPUs, because most of their time compiles kernels; tests at the sizes of a server run in few
processes, because they need GPU memory.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from varlen_bench.harness.machine import cpu_count
from varlen_tools.setup_server import SERVER_FOLDER

# The server tests need these packages and the server that `make setup` assembles.
_SERVER_PACKAGES = ("tritonclient", "grpc")
# pytest's exit status if nothing was selected.
_NO_TESTS = 5


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests that run in one call of pytest.

    Attributes:
        processes: largest number of test processes.
    """

    name: str
    paths: tuple[str, ...]
    processes: int

    def command(self, *arguments: str) -> list[str]:
        """Return the command line; `arguments` are added to pytest's."""
        # versions differ from machine to machine, and a newer one may warn
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default"]
        processes = min(cpu_count(), self.processes)
        if processes > 1 and find_spec("xdist") is not None:
            command += ["--numprocesses", str(processes), "--dist", "worksteal"]
        return [*command, *arguments, *self.paths]


KERNELS = Suite("kernels", ("tests/kernels/triton",), processes=16)
SERVED_SHAPES = Suite("served shapes", ("tests/kernels/gpu/test_served_shapes.py",), processes=4)
# hangs the GPU for seconds, so no other test runs meanwhile
LOST_GPU = Suite("lost GPU", ("tests/kernels/gpu/test_lost_gpu.py",), processes=1)
_SERVER_TESTS = Suite("server", ("tests/server/test_gpu.py",), processes=1)


def suites() -> list[Suite]:
    """Return the suites that this machine can collect, in their order."""
    has_server = SERVER_FOLDER.is_dir() and all(find_spec(name) for name in _SERVER_PACKAGES)
    return [KERNELS, SERVED_SHAPES, *([_SERVER_TESTS] if has_server else []), LOST_GPU]


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of the first suite that failed, else 0.

    Args:
        arguments: arguments of pytest. If some begin with "tests/", only those run, in one suite.
    """
    paths = tuple(argument for argument in arguments if argument.startswith("tests/"))
    options = [argument for argument in arguments if argument not in paths]
    chosen = [Suite("chosen", paths, SERVED_SHAPES.processes)] if paths else suites()
    failed = 0
    for suite in chosen:
        print(f"== {suite.name}: {' '.join(suite.paths)}", flush=True)
        status = subprocess.run(suite.command(*options), check=False).returncode
        failed = failed or (status if status != _NO_TESTS else 0)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
