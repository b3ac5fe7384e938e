"""A tritonserver with frontends of a newer release, in front of the core from `make setup`.

pip has no newer server, but its wheel `tritonfrontend` has the HTTP and gRPC frontends of a release since 26.06. They
call a core by the server's C interface, so the core 2.51 and its python backend serve behind them. To run tests on it,
with Python 3.12 and the wheel in an environment of its own, write an executable file:

    #!/bin/sh
    exec ~/frontends/bin/python tests/server/newer_frontends.py .venv/share/varlen/server "$@"

with absolute paths, and set the variable VARLEN_TEST_SERVER to its path. Shared memory of clients is not served, nor is
any option of tritonserver that is not read below.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LOOPBACK = "127.0.0.1"
EXPLICIT = 2
_ERRORS = ("Internal", "InvalidArgument", "NotFound", "Unavailable", "AlreadyExists", "Unsupported")


def main() -> None:
    """Serve until a signal comes; the arguments are the kit's folder and options of tritonserver."""
    kit = Path(sys.argv[1]).absolute()
    if "LD_PRELOAD" not in os.environ:
        _run_with_core(kit)
    # the stubs need no core
    del os.environ["LD_PRELOAD"]
    frontends = _import_frontends()
    server = _start_core(kit, sys.argv[2:])
    given = dict(_options(sys.argv[2:]))
    started = [
        getattr(frontends, name)(
            SimpleNamespace(_ptr=lambda: server.value),
            getattr(frontends, name).Options(address=LOOPBACK, port=int(given[port]), **sharing),
        )
        for name, port, sharing in (
            ("KServeHttp", "http-port", {"reuse_port": True}),
            ("KServeGrpc", "grpc-port", {"reuse_port": True}),
            ("Metrics", "metrics-port", {}),
        )
    ]
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    for frontend in started:
        frontend.start()
    while not ended.wait(0.2):
        pass
    _call("ServerStop", server)
    for frontend in started:
        frontend.stop()
    os._exit(0)


def _run_with_core(kit: Path) -> None:
    """Replace this process by one that has the kit's core, not the wheel's empty one."""
    (core,) = (kit / "lib").glob("libtritonserver-*.so")
    python = kit.parents[2] / "bin"
    changes = {"LD_PRELOAD": str(core), "LD_LIBRARY_PATH": str(kit / "lib")}
    # the stub finds packages from the first python3 of the path
    changes["PATH"] = f"{python}:{os.environ['PATH']}"
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | changes)


def _import_frontends() -> Any:
    """Import the frontends without the package `tritonserver`, whose errors they only name."""
    errors = ModuleType("tritonserver")
    for name in ("TritonError", "UnknownError", *(f"{name}Error" for name in _ERRORS)):
        setattr(errors, name, type(name, (Exception,), {}))
    sys.modules["tritonserver"] = errors
    import tritonfrontend

    return tritonfrontend


def _start_core(kit: Path, arguments: Iterable[str]) -> ctypes.c_void_p:
    options, server = ctypes.c_void_p(), ctypes.c_void_p()
    _call("ServerOptionsNew", ctypes.byref(options))
    given = list(_options(arguments))
    values: list[tuple[str, str | int]] = [
        ("BackendDirectory", str(kit / "backends")),
        ("StrictModelConfig", int(("disable-auto-complete-config", "") in given)),
        ("ExitOnError", 0),
        ("CpuMetrics", 0),
        ("GpuMetrics", 0),
    ]
    values += [
        ("ModelRepositoryPath", value) for name, value in given if name == "model-repository"
    ]
    values += [("StartupModel", value) for name, value in given if name == "load-model"]
    if ("model-control-mode", "explicit") in given:
        values.append(("ModelControlMode", EXPLICIT))
    for name, value in values:
        _call(
            f"ServerOptionsSet{name}", options, value.encode() if isinstance(value, str) else value
        )
    _call("ServerNew", ctypes.byref(server), options)
    return server


def _options(arguments: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Return the names and values of options in the form `--name=value`."""
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        yield name, value


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the server's C interface; end the process if it fails."""
    interface: Any = ctypes.CDLL(None)
    function, message = interface[f"TRITONSERVER_{name}"], interface["TRITONSERVER_ErrorMessage"]
    function.restype, message.restype = ctypes.c_void_p, ctypes.c_char_p
    error = function(*arguments)
    if error:
        raise SystemExit(f"{name}: {message(ctypes.c_void_p(error)).decode()}")


if __name__ == "__main__":
    main()
