"""The tritonserver that `varlen serve` starts: an installed one, else the development server from wheels."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from varlen_client.cli.progress import show_stage
from varlen_client.cli.serve_http import API_KEYS
from varlen_tools.local_server import LOOPBACK, LocalServer, ServerError
from varlen_tools.run_server import ENDPOINTS
from varlen_tools.scratch import remove_unused, scratch_folder
from varlen_tools.setup_server import SERVER_FOLDER, SetupError, backend_package, set_up

_COMMAND = "tritonserver"
# The server ends by itself if a model cannot be loaded; large ones take minutes to be read.
LOAD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A tritonserver that loads varlen.

    Attributes:
        backends: folder of its own backends.
        arguments: arguments that it needs to find varlen.
    """

    path: str
    backends: Path
    arguments: tuple[str, ...] = ()


@contextmanager
def server_command() -> Iterator[ServerCommand]:
    """Yield the server on PATH, else the development server, which is assembled first.

    Raises:
        ServerError: there is none, and none can be assembled here.
    """
    # `make setup` and this function put the development server's command here
    own = Path(sys.executable).parent / _COMMAND
    found = shutil.which(_COMMAND)
    if found is None or _is_development_server(Path(found)):
        try:
            with show_stage("setting up the server"):
                set_up()
        except SetupError as error:
            raise ServerError(str(error)) from None
        yield ServerCommand(str(own), SERVER_FOLDER / "backends")
        return
    with _with_backend(Path(found)) as command:
        yield command


def _is_development_server(command: Path) -> bool:
    with command.open("rb") as file:
        return b"varlen_tools.setup_server" in file.read(200)


@contextmanager
def _with_backend(server: Path) -> Iterator[ServerCommand]:
    """Yield an installed server with varlen among its backends, without changing its folder."""
    backends = server.resolve().parents[1] / "backends"
    if (backends / "varlen").exists():
        yield ServerCommand(str(server), backends)
        return
    if not (backends / "python").is_dir():
        raise ServerError(
            f"{server} has no python backend, which varlen runs in; expected: {backends / 'python'}"
        )
    try:
        package = backend_package()
    except SetupError as error:
        raise ServerError(str(error)) from None
    with scratch_folder("varlen-backends-") as folder:
        for entry in backends.iterdir():
            Path(folder.path, entry.name).symlink_to(entry)
        Path(folder.path, "varlen").symlink_to(package)
        yield ServerCommand(str(server), backends, (f"--backend-directory={folder.path}",))


def start_server(
    command: ServerCommand,
    models: Sequence[Path],
    arguments: Sequence[str] = (),
    *,
    first_port: int | None = None,
) -> LocalServer:
    """Return a server, not yet started, that loads only these models.

    Args:
        first_port: first of its three ports on loopback; None takes free ones.
    """
    # as the development server's command does
    remove_unused()
    all_arguments = [
        *command.arguments,
        *arguments,
        *(f"--{endpoint}-address={LOOPBACK}" for endpoint in ENDPOINTS),
    ]
    # the server's stubs find packages beside the first python3 on PATH
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return LocalServer(
        models,
        arguments=all_arguments,
        # keys of the gateway are not for models
        environment={"PATH": path, API_KEYS: ""},
        command=command.path,
        first_port=first_port,
        ends_with_thread=True,
    )
