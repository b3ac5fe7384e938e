"""A process of a model: loads the model, then answers batches.

It gets a socket of whole JSON messages, its control socket. The engine sends the checkpoint and the settings, and gets
log lines and then the model's description, or an error. When the engine closes its end, or dies, the process ends.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, NoReturn, Protocol, TypeVar

from varlen.config import EngineConfig
from varlen.errors import VarlenError
from varlen.execution.executor import SkippedStepError
from varlen.execution.model_info import ModelInfo
from varlen.execution.workers.messages import Answers, send_answers
from varlen.memory.heap import return_large_memory, trim_heap
from varlen.memory.memory_use import MemoryUse
from varlen.processes import freeze_objects, log_by, set_log_level
from varlen.request.request import Float32Array

_log = logging.getLogger("varlen")

# Largest message on a control socket, in bytes; a socket of whole messages holds twice as much by default.
MAX_MESSAGE = 1 << 16
# Characters of a log line or an error, which JSON may make six times as long.
_TEXT_CHARACTERS = MAX_MESSAGE // 16
# Option of prctl, on Linux: the signal that a process gets when the thread that started it ends.
_SET_PARENT_DEATH_SIGNAL = 1
# File descriptors of a message at most.
MOST_DESCRIPTORS = 5
# Seconds between two trims of a worker's heap.
_TRIM_SECONDS = 1.0
# Seconds without a batch after which a worker returns the memory of intermediates.
IDLE_SECONDS = 10

_Order = TypeVar("_Order")
_Order_co = TypeVar("_Order_co", covariant=True)


class LoadedModel(Protocol):
    """A model that this process has loaded."""

    @property
    def info(self) -> ModelInfo:
        """Model facts for the engine."""


_Model = TypeVar("_Model", bound=LoadedModel)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process is to load.

    Attributes:
        control: its control socket.
        folder: folder of the checkpoint.
        config: the settings.
        rank: its number among the ranks of the model.
        descriptors: file descriptors that it got.
    """

    control: socket.socket
    folder: Path
    config: EngineConfig
    rank: int
    descriptors: Sequence[int]


def run_model(
    load: Callable[[Setup], _Model], serve: Callable[[socket.socket, _Model], None]
) -> None:
    """Load a model, describe it to the engine, and serve it.

    Args:
        load: returns the model of a setup.
        serve: serves it until the engine closes the control socket, which it gets.
    """
    # it ends with its socket: a signal for every process of a server must not end a batch that it still answers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    # before the engine says which model it is
    import_module("torch")
    log_by(_ToEngine(control))
    message, descriptors, *_ = socket.recv_fds(control, MAX_MESSAGE, MOST_DESCRIPTORS)
    if not message:
        # the engine's process has ended
        return
    fields = json.loads(message)
    set_log_level(fields["log_level"])
    return_large_memory()
    config = EngineConfig(**fields["config"])
    setup = Setup(control, Path(fields["folder"]), config, fields.get("rank", 0), descriptors)
    try:
        model = load(setup)
    except VarlenError as error:
        send(control, {"error": [type(error).__name__, str(error)[:_TEXT_CHARACTERS]]})
        return
    except Exception:
        _log.exception("the model could not be loaded")
        send(control, {"error": ["EngineError", "the model could not be loaded"]})
        return
    freeze_objects()
    # what the load has freed; processes that are forked from this one would all keep it
    trim_heap()
    send(control, {"model": asdict(model.info)})
    serve(control, model)


class Orders(Protocol[_Order_co]):
    """Batches as they arrive."""

    def next(self, timeout: float | None) -> _Order_co | None:
        """Return the next batch, or None after this many seconds; None is no limit.

        Raises:
            EOFError, OSError: the engine has closed the connection.
        """


class DirectOrders(Generic[_Order]):
    """Batches that are read when they run: `Orders`."""

    def __init__(self, connection: Connection, receive: Callable[[Connection], _Order]) -> None:
        """Read from a connection to the engine; `receive` returns its next batch."""
        self._connection = connection
        self._receive = receive
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)

    def next(self, timeout: float | None) -> _Order | None:
        """Return the next batch; see `Orders`."""
        has_arrived = self._arrivals.poll(None if timeout is None else 1000 * timeout)
        return self._receive(self._connection) if has_arrived else None


def answer_batches(
    connection: Connection,
    orders: Orders[_Order],
    run: Callable[[_Order], Sequence[Float32Array]],
    use: Callable[[], MemoryUse],
    release: Callable[[], None],
) -> NoReturn:
    """Answer batches until the engine closes the connection, then end the process.

    Args:
        connection: connection to the engine.
        orders: the batches.
        run: returns the answers of a batch.
        use: returns the memory use.
        release: returns memory to the system after some seconds without a batch.
    """
    # later lines have no engine that reads them
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(logging.Formatter("varlen: worker %(process)d: %(message)s"))
    log_by(to_stderr)
    status, trimmed = 1, 0.0
    try:
        while True:
            order = orders.next(IDLE_SECONDS)
            if order is None:
                release()
                trim_heap()
                order = orders.next(None)
            assert order is not None
            send_answers(connection, _answers(order, run, use))
            if time.monotonic() - trimmed > _TRIM_SECONDS:
                trim_heap()
                trimmed = time.monotonic()
    except (EOFError, OSError):
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # without cleanup: everything but the connection may belong to the process that forked this one
        os._exit(status)


def end_with_parent() -> None:
    """Have the system end this process with the thread that started it.

    A control socket tells of that end too, but not a process that is stopped, or that waits for another one.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def send(
    control: socket.socket, message: dict[str, object], descriptors: Sequence[int] = ()
) -> None:
    """Send a message to the engine, perhaps with file descriptors."""
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def _answers(
    order: _Order,
    run: Callable[[_Order], Sequence[Float32Array]],
    use: Callable[[], MemoryUse],
) -> Answers:
    try:
        rows = run(order)
    except MemoryError:
        return Answers((), use(), "memory")
    except SkippedStepError:
        return Answers((), use(), "skipped")
    except Exception:
        return Answers((), use(), "error", traceback.format_exc())
    return Answers(rows, use())


class _ToEngine(logging.Handler):
    """Sends log records to the engine, which logs them."""

    def __init__(self, control: socket.socket) -> None:
        super().__init__()
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[-_TEXT_CHARACTERS:]
            send(self._control, {"log": [record.levelno, text]})
        except Exception:
            self.handleError(record)
