"""The process that forks the sandbox's processes: `python -m varlen.sandbox.host FD`.

It reads its setup from standard input and loads what all of them share: the tokens of the model, and the chat template.
It has one thread, so a fork leaves no lock behind. FD is a socket of whole JSON messages. The host says what it cannot
serve; then each order of the engine brings the socket of a new process, or ends one. When the engine closes its end, or
dies, all end.
"""

import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

from varlen.processes import freeze_objects
from varlen.sandbox.frames import Frames
from varlen.sandbox.limits import OUT_OF_MEMORY, SandboxLimits, limit_memory

MAX_MESSAGE = 1 << 16

# Characters of a traceback, whose lines may repeat a template.
_MAX_TRACE = 4000

Serve: TypeAlias = Callable[[Frames, SandboxLimits], None]


def main() -> None:
    """Load what the processes share, then fork one for each socket that comes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # whatever the server's process has done with them: children are waited for, and their timers end them
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    control = socket.socket(fileno=int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = json.load(sys.stdin.buffer)
    limits = SandboxLimits(**setup["limits"])
    services, refused = _load(setup)
    del setup
    freeze_objects()
    children: set[int] = set()
    try:
        _send(control, {"refused": refused})
        while (received := socket.recv_fds(control, MAX_MESSAGE, 1))[0]:
            order = json.loads(received[0])
            if "end" in order:
                _send(control, {"code": _end(children, order["end"])})
            else:
                _fork(control, children, services[order["fork"]], received[1], limits)
    except ConnectionError:
        # the engine has closed its end without reading everything
        pass
    finally:
        for pid in [*children]:
            _end(children, pid)


def _load(setup: dict[str, Any]) -> tuple[dict[str, Serve], dict[str, str]]:
    """Return what each kind of process does, and the reasons why others are not served."""
    services: dict[str, Serve] = {}
    refused: dict[str, str] = {}
    if setup.get("tokens"):
        # loaded where it is needed: models without an end token have no grammars
        from varlen.sandbox.grammar import GrammarServer

        try:
            services["grammar"] = GrammarServer(**setup["tokens"]).serve
        except ValueError:
            refused["grammar"] = "the tokens of this model are no parts of texts"
        except BaseException:
            # a panic of the library is no Exception
            sys.stderr.write(traceback.format_exc()[-_MAX_TRACE:])
            refused["grammar"] = "the grammar library cannot read the tokens of this model"
    else:
        refused["grammar"] = "this model has no end token"
    if setup.get("template"):
        from varlen.sandbox.template import TemplateServer

        services["template"] = TemplateServer(**setup["template"]).serve
    return services, refused


def _fork(
    control: socket.socket,
    children: set[int],
    serve: Serve,
    descriptors: list[int],
    limits: SandboxLimits,
) -> None:
    if not descriptors:
        _send(control, {"error": "no process can be started: too many open files"})
        return
    [descriptor] = descriptors
    try:
        pid = os.fork()
    except OSError as error:
        os.close(descriptor)
        _send(control, {"error": f"no process can be started: {error.strerror}"})
        return
    if not pid:
        control.close()
        _serve(serve, descriptor, limits)
    os.close(descriptor)
    children.add(pid)
    _send(control, {"pid": pid})


def _serve(serve: Serve, descriptor: int, limits: SandboxLimits) -> None:
    """Serve orders until the engine closes the connection; never returns."""
    status = 1
    try:
        frames = Frames(socket.socket(fileno=descriptor))
        limit_memory(limits.num_bytes)
        serve(frames, limits)
    except (EOFError, OSError):
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    except BaseException:
        sys.stderr.write(traceback.format_exc()[-_MAX_TRACE:])
        sys.stderr.flush()
    finally:
        os._exit(status)


def _end(children: set[int], pid: int) -> int | None:
    """End a child, unless it has ended; return its exit code.

    The code of a signal is negative. A process that is no child of this one has none.
    """
    if pid not in children:
        return None
    children.remove(pid)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _send(control: socket.socket, message: dict[str, object]) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
