"""The commands `tritonserver` and `perf_analyzer`: checks, then the real binaries.

The server from pip is for development and tests, so it listens on 127.0.0.1 unless an address is given.
Only the standard library is imported, so that the commands start at once.
"""

import errno
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from varlen_tools.scratch import described, remove_unused

# Groups of calls that let a client write the server's memory, or change what it logs and traces. The calls that load
# models are shut by the server's mode of model control, `none` by default.
MANAGEMENT = ("shared-memory", "trace", "logging")
LOOPBACK = "127.0.0.1"
# endpoint -> default port
ENDPOINTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def tritonserver() -> NoReturn:
    """Run the kit's server; the first argument is the kit's folder."""
    kit, arguments = Path(sys.argv[1]), sys.argv[2:]
    try:
        arguments = server_arguments(arguments, kit)
        if not {"--help", "-h", "--version"} & set(arguments):
            check_numpy(metadata.version("numpy"))
            check_folder(Path.cwd())
            check_ports(arguments)
            _remove_shared_memory()
    except ValueError as error:
        _stop(str(error))
    _become(kit / "bin/tritonserver", arguments, server_environment(kit, os.environ))


def perf_analyzer() -> NoReturn:
    """Run the kit's perf_analyzer; the first argument is the kit's folder."""
    kit, arguments = Path(sys.argv[1]), sys.argv[2:]
    folders = library_path(kit, for_perf_analyzer=True)
    _become(kit / "bin/perf_analyzer", arguments, os.environ | {"LD_LIBRARY_PATH": folders})


def server_arguments(arguments: Sequence[str], kit: Path) -> list[str]:
    """Return `arguments`, by default with the kit's backends, loopback addresses and no management."""
    given = options(arguments)
    defaults = {"backend-directory": str(kit / "backends")}
    # Metrics too: by default the server uses the HTTP address, which may be public.
    defaults |= {f"{endpoint}-address": LOOPBACK for endpoint in ENDPOINTS}
    defaults |= restrictions(MANAGEMENT)
    added = [f"--{name}={value}" for name, value in defaults.items() if name not in given]
    return [*added, *arguments]


def restrictions(groups: Sequence[str]) -> dict[str, str]:
    """Return the server's options that refuse groups of calls to every client.

    A request would need a header whose name has a colon, and neither protocol can carry one. A secret would stand in
    the arguments of the server, which every user of the machine can read.
    """
    rule = f"{','.join(groups)}:closed:to-all=clients"
    return {"http-restricted-api": rule, "grpc-restricted-protocol": rule}


def options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of `--name=value` and `--name value`, the last one of each name."""
    given: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            following = arguments[index + 1 : index + 2]
            given[name] = value if equals else next(iter(following), "")
    return given


def check_numpy(version: str) -> None:
    """Raise ValueError for numpy 2, with which the python backend misreads texts.

    Its stub was built for numpy 1: it reads the item size of numpy 2's arrays from the wrong place.
    """
    if int(version.partition(".")[0]) >= 2:
        raise ValueError(
            f"numpy {version} is installed; this server's python backend works with numpy 1 only:"
            f" {sys.executable} -m pip install 'numpy<2'"
        )


def check_folder(folder: Path) -> None:
    """Raise ValueError if the working folder has a model.py, which would be loaded first."""
    if (folder / "model.py").exists():
        raise ValueError(
            f"{folder} has a model.py, which would be loaded in place of every python-based"
            " backend; start the server from another folder"
        )


def check_ports(arguments: Sequence[str]) -> None:
    """Raise ValueError if a port is taken or not a number."""
    given = options(arguments)
    for endpoint, default in ENDPOINTS.items():
        is_off = given.get(f"allow-{endpoint}", "true").lower() in {"false", "0"}
        if not is_off and f"reuse-{endpoint}-port" not in given:
            option = f"--{endpoint}-port"
            port = given.get(f"{endpoint}-port", str(default))
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{option} is {port!r}; give a number from 1 to 65535")
            if is_taken(given.get(f"{endpoint}-address", LOOPBACK), int(port)):
                raise ValueError(f"port {port} is in use; pass {option} with a free one")


def is_taken(address: str, port: int) -> bool:
    """Return whether another process listens on a port of an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        # As the server does, so that connections that have just ended are ignored.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            # The server reports other errors, such as an address of another machine.
            return error.errno == errno.EADDRINUSE
    return False


def library_path(kit: Path, *, for_perf_analyzer: bool = False) -> str:
    """Return LD_LIBRARY_PATH with the kit's libraries first."""
    folders = [str(kit / "lib")]
    if for_perf_analyzer:
        folders.insert(0, str(kit / "lib-perf_analyzer"))
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def server_environment(kit: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which the python backend embeds this virtual environment's Python.

    Without PYTHONHOME, the stub finds packages from the first `python3` on PATH.
    """
    kept = {name: value for name, value in environment.items() if name != "PYTHONHOME"}
    folders = [str(Path(sys.executable).parent), environment.get("PATH")]
    path = os.pathsep.join(filter(None, folders))
    return kept | {"PATH": path, "LD_LIBRARY_PATH": library_path(kit)}


def _remove_shared_memory() -> None:
    if removed := remove_unused():
        print(
            f"tritonserver: removed shared memory of ended servers: {described(removed)}",
            file=sys.stderr,
        )


def _become(binary: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process, so that its process id is the server's."""
    if not binary.is_file():
        _stop(f"there is no {binary}; run python -m varlen_tools.setup_server")
    os.execve(binary, [binary.name, *arguments], dict(environment))


def _stop(message: str) -> NoReturn:
    print(f"tritonserver: {message}", file=sys.stderr)
    raise SystemExit(2)
