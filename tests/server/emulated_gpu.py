"""A tritonserver whose models see an emulated GPU.

Its stub embeds the Python of an environment that has all packages of this one, and `emulated/sitecustomize.py`, which
puts the emulator of tests/kernels/triton/fake_cuda.py into the processes of models. So the product is the same as on a
GPU: what the server sends, the stub, graphs, copies, waits, and faults of a device.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from varlen_tools import setup_server
from varlen_tools.local_server import LocalServer
from varlen_tools.scratch import remove_unused

from .emulated.sitecustomize import COUNT, LOST
from .serving import TIMEOUT_SECONDS

EMULATOR = Path(__file__).parent / "emulated"


class EmulatedServer(LocalServer):
    """A server of models on emulated GPUs.

    Attributes:
        lost: the GPUs are lost while this file exists: every call fails, as after a fault on a GPU.
    """

    def __init__(self, repository: Path, folder: Path, *, gpus: int = 1) -> None:
        """Make the environment of the server in a folder."""
        self.lost = folder / "lost"
        super().__init__(
            repository,
            command=_command(folder / "environment"),
            environment={COUNT: str(gpus), LOST: str(self.lost)},
            # without metrics of GPUs, for which the server asks a driver
            arguments=["--allow-gpu-metrics=false", "--exit-timeout-secs=2"],
            is_managed=True,
        )


@contextmanager
def emulated_server(repository: Path, folder: Path, *, gpus: int = 1) -> Iterator[EmulatedServer]:
    """Run a server that loads no model yet; see `EmulatedServer`."""
    with EmulatedServer(repository, folder, gpus=gpus) as server:
        server.wait_ready(TIMEOUT_SECONDS)
        yield server
        server.stop(timeout=5)
    remove_unused()


def _command(environment: Path) -> Path:
    """Return a `tritonserver` whose stubs embed the Python of a new environment."""
    python = Path(
        sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"
    )
    packages = environment / "lib" / python.name / "site-packages"
    packages.mkdir(parents=True)
    (packages / "varlen.pth").write_text("\n".join(filter(None, sys.path)))
    (packages / "sitecustomize.py").symlink_to(EMULATOR / "sitecustomize.py")
    (environment / "pyvenv.cfg").write_text(f"home = {python.parent}\n")
    commands = environment / "bin"
    commands.mkdir()
    for name in ("python", "python3", python.name):
        (commands / name).symlink_to(python)
    texts = setup_server._commands(setup_server.SERVER_FOLDER, commands)
    command = commands / "tritonserver"
    command.write_text(texts[command])
    command.chmod(0o755)
    return command
