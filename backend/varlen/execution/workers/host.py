"""The process that loads a model and forks its workers: `python -m varlen.execution.workers.host FD`.

Workers share the weights with it, page by page, until one of them writes, which none does. A worker that was killed
is forked again within milliseconds. No thread of it works at that time, so a fork leaves no lock behind.

FD is a socket of whole JSON messages. The engine sends the checkpoint and the settings, and gets log lines and then
the model's description, or an error. After that each message of the engine brings the socket of a new worker. When
the engine closes its end, or dies, workers and host end.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.config import EngineConfig
from varlen.errors import VarlenError
from varlen.execution.workers.messages import Answers, receive_batch, send_answers
from varlen.memory.heap import return_large_memory, trim_heap

if TYPE_CHECKING:
    from varlen.execution.runner import Runner

_log = logging.getLogger("varlen")

# Largest message to or from a host, in bytes; a socket of whole messages holds twice as much by default.
MAX_MESSAGE = 1 << 16
# Of a log line or an error, which JSON may make six times as long.
_TEXT_CHARACTERS = MAX_MESSAGE // 16
# Seconds between two trims of a worker's heap.
_TRIM_SECONDS = 1.0


def main() -> None:
    """Load the model, then fork a worker for each socket that comes."""
    # all end with their sockets: a signal for every process of a server must not end a batch that it still answers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    logger = logging.getLogger("varlen")
    logger.addHandler(_ToEngine(control))
    logger.setLevel(logging.INFO)
    message, *_ = socket.recv_fds(control, MAX_MESSAGE, 0)
    try:
        runner = _load(**json.loads(message))
    except VarlenError as error:
        _send(control, {"error": [type(error).__name__, str(error)[:_TEXT_CHARACTERS]]})
        return
    except Exception:
        _log.exception("the model could not be loaded")
        _send(control, {"error": ["EngineError", "the model could not be loaded"]})
        return
    # collections in a worker would write to every page that holds an object
    gc.collect()
    gc.freeze()
    _send(control, {"model": asdict(runner.info)})
    _fork_workers(control, runner)


def _load(folder: str, config: dict[str, Any], log_level: str) -> Runner:
    _log.setLevel(log_level)
    return_large_memory()
    import torch

    from varlen.execution.device import usable_cores
    from varlen.execution.runner import Runner
    from varlen.models.checkpoint_folder import Checkpoint

    settings = EngineConfig(**config)
    workers = settings.threads or usable_cores()
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(Path(folder), ignore_config_fields=settings.ignored_fields)
    runner = Runner(checkpoint, settings, workers=workers, measures=True)
    # once for all workers
    runner.compile()
    return runner


def _fork_workers(control: socket.socket, runner: Runner) -> None:
    workers: set[int] = set()
    while True:
        message, descriptors, *_ = socket.recv_fds(control, MAX_MESSAGE, 1)
        if not message:
            break
        code = _exit_code(workers, json.loads(message)["ended"])
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptors[0])
            _send(
                control, {"error": ["EngineError", f"no worker can be started: {error.strerror}"]}
            )
            continue
        if not pid:
            control.close()
            _log.handlers[:] = [logging.StreamHandler()]
            _run_batches(Connection(descriptors[0]), runner)
        os.close(descriptors[0])
        workers.add(pid)
        _send(control, {"pid": pid, "code": code})
    for pid in workers:
        os.waitpid(pid, 0)


def _exit_code(workers: set[int], ended: int | None) -> int | None:
    """Forget a worker that has ended; return its exit code, negative for a signal."""
    if ended not in workers:
        return None
    workers.remove(ended)
    _, status = os.waitpid(ended, 0)
    return os.waitstatus_to_exitcode(status)


def _run_batches(connection: Connection, runner: Runner) -> None:
    """Answer batches until the engine closes the connection; never returns."""
    status, trimmed = 1, 0.0
    try:
        while True:
            send_answers(connection, _answers(runner, connection))
            if time.monotonic() - trimmed > _TRIM_SECONDS:
                trim_heap()
                trimmed = time.monotonic()
    except (EOFError, OSError):
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # without cleanup: everything but the connection belongs to the host
        os._exit(status)


def _answers(runner: Runner, connection: Connection) -> Answers:
    prompts, options = receive_batch(connection)
    try:
        rows = runner.run(prompts, options)
    except MemoryError:
        return Answers((), runner.use(), "memory")
    except Exception:
        return Answers((), runner.use(), "error", traceback.format_exc())
    return Answers(rows, runner.use())


def _send(control: socket.socket, message: dict[str, object]) -> None:
    control.send(json.dumps(message).encode())


class _ToEngine(logging.Handler):
    """Sends log records to the engine, which logs them."""

    def __init__(self, control: socket.socket) -> None:
        super().__init__()
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[-_TEXT_CHARACTERS:]
            _send(self._control, {"log": [record.levelno, text]})
        except Exception:
            self.handleError(record)


if __name__ == "__main__":
    main()
