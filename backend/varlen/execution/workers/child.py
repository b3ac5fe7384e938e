"""A process of a model: `python -m varlen.execution.workers.child FD [member]`.

FD is its control socket, of whole JSON messages. The engine sends the checkpoint and the settings, and gets log lines
and then the model's description, or an error. Each later message of the engine brings the connection of a worker, and
the memory that says whether its batch runs alone. When the engine closes its end, or dies, the process ends.

Where all ops of a model of one step are compiled, the process executes itself anew, as `child FD compiled MODEL`: MODEL
is a file in memory, and torch is gone. `child FD stored` reads it from the cache folder instead, and imports torch only
if the model is not there any more (`compiled_work`).

Workers of a model of one step are forked, and share the weights. No thread works at that time, so a fork leaves no lock
behind. A process that has keys and values, or that leads others, is its own only worker. The others get their control
socket from the leader, run the work that it sends, and end with it. `child FD waiting` gets it from the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from varlen.errors import AdapterFaultError, EngineError, VarlenError
from varlen.execution.executor import SkippedStepError
from varlen.execution.thread_executor import CoreShare
from varlen.execution.workers.messages import (
    CHILD,
    COMPILED,
    MAX_MESSAGE,
    MEMBER,
    STORED,
    WAITING,
    Answers,
    Array,
    Orders,
    Problem,
    ReadAhead,
    Work,
    peer_of,
    receive_control,
    send_answers,
    send_control,
)
from varlen.processes import (
    drop_library_pages,
    end_with_parent,
    freeze_objects,
    log_by,
    name_process,
    python_command,
    return_large_memory,
    set_log_level,
    trim_heap,
)

if TYPE_CHECKING:
    from varlen.execution.runner import Runner
    from varlen.execution.workers.compiled_work import CompiledWork, StoredModel
    from varlen.execution.workers.group import Leader, Member

_log = logging.getLogger("varlen")

# Characters of a log line or an error, which JSON may make six times as long.
_TEXT_CHARACTERS = MAX_MESSAGE // 16
# Lines of a load that are stored with its model at most.
_KEPT_LINES = 100
_COMPILED_WORK = "varlen.execution.workers.compiled_work"
# Seconds that a process waits for the engine.
_WAIT_SECONDS = 10.0
# Seconds between two trims of a worker's heap.
_TRIM_SECONDS = 1.0
# Seconds without a batch after which a worker returns the memory of intermediates.
IDLE_SECONDS = 10

_Order = TypeVar("_Order")
_Part = TypeVar("_Part")


def main() -> None:
    """Load a model, or a part of one, and run it."""
    if MEMBER in sys.argv:
        # first of all: the leader may be killed while this process imports torch
        end_with_parent()
    if os.getpgrp() != os.getpid():
        # a signal for the server's group is not for it
        os.setpgid(0, 0)
    # it ends with its socket: a signal for every process of a server must not end a batch that it still answers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    if WAITING in sys.argv:
        control = _taken_over(control)
    # the engine's process, or the leader, need not be its parent
    name_process(f"varlen {peer_of(control)[0]}")
    engine = _ToEngine(control)
    log_by(engine)
    return_large_memory()
    try:
        if COMPILED in sys.argv:
            work, serve = _read_compiled(control, int(sys.argv[-1]))
        else:
            _import_work()
            work, serve = _load(control, engine)
    except VarlenError as error:
        send_control(control, _error(error))
        return
    except Exception:
        _log.exception("the model could not be loaded")
        send_control(control, _error(EngineError("the model could not be loaded")))
        return
    freeze_objects()
    # what the load has freed; processes that are forked from this one would all keep it
    trim_heap()
    drop_library_pages()
    send_control(control, {"model": work.runner.facts()})
    serve()


def _import_work() -> None:
    # before the engine says which model it is
    import_module(_COMPILED_WORK if STORED in sys.argv else "varlen.execution.workers.work")


def _taken_over(address: socket.socket) -> socket.socket:
    """Return the engine's control socket; end the process if none takes it over."""
    # the other end gets the id of the process that listens
    address.listen(1)
    _import_work()
    address.settimeout(_WAIT_SECONDS)
    while True:
        try:
            control, _ = address.accept()
        except TimeoutError:
            sys.exit()
        if peer_of(control)[1] == os.getuid():
            address.close()
            return control
        control.close()


def _load(control: socket.socket, engine: _ToEngine) -> tuple[Work[Any, Any], Callable[[], None]]:
    """Return the work of this process, and what runs it."""
    try:
        fields, descriptors = receive_control(control)
    except EOFError:
        # the engine's process has ended
        sys.exit()
    set_log_level(fields["log_level"])
    from varlen.execution.workers.compiled_work import StoredModel

    stored = StoredModel.of(fields)
    if stored is not None and STORED in sys.argv and (found := stored.read()) is not None:
        _log.info("the workers hold no torch: the compiled model is read from the cache")
        for level, line in found.lines:
            _log.log(level, "%s (when it was loaded)", line)
        return _serve_compiled(control, found)
    from varlen.config import EngineConfig
    from varlen.execution.workers.group import Leader, Member
    from varlen.execution.workers.process import Setup
    from varlen.execution.workers.work import BatchWork, StepWork

    setup = Setup(control, fields, EngineConfig(**fields["config"]), descriptors)
    kind = StepWork if setup.generates else BatchWork
    if setup.number is not None:
        member = Member(setup)
        part = kind(setup, member)
        return part, partial(_follow, control, member, part.runner, part.read)
    leader = Leader(setup, kind.message_of) if setup.config.num_processes > 1 else None
    work = kind(setup, leader)
    work.warm_up()
    if leader is not None:
        leader.finish_load()
    if work.is_forked:
        if stored != StoredModel.of(fields):
            # files have changed meanwhile
            stored = None
        _leave_torch(control, work.runner, fields["log_level"], [*engine.lines], stored)
    return work, partial(_connect_workers, control, leader, work)


def _leave_torch(
    control: socket.socket,
    runner: Runner,
    log_level: str,
    lines: Sequence[tuple[int, str]],
    stored: StoredModel | None,
) -> None:
    """Execute this process anew, without torch; return if the model needs torch.

    Args:
        lines: see `write_model`.
        stored: file for a copy of the model.
    """
    from varlen.execution.workers.compiled_work import torch_reason, write_model

    reason = torch_reason(runner)
    if not reason:
        try:
            with os.fdopen(write_model(runner, log_level, lines)) as model:
                if stored is not None:
                    stored.write(model.fileno())
                own = control.fileno(), model.fileno()
                for each in own:
                    os.set_inheritable(each, True)
                _log.info("the workers hold no torch: all ops of the model are compiled")
                python = python_command()
                os.execv(python, [python, "-m", CHILD, str(own[0]), COMPILED, str(own[1])])
        except OSError as error:
            reason = str(error)
    _log.info("the workers hold torch: %s", reason)


def _read_compiled(
    control: socket.socket, descriptor: int
) -> tuple[Work[Any, Any], Callable[[], None]]:
    """Return the work of a process without torch, and what runs it."""
    from varlen.execution.workers.compiled_work import CompiledWork, read_content

    work = CompiledWork(read_content(descriptor))
    os.close(descriptor)
    set_log_level(work.log_level)
    return _serve_compiled(control, work)


def _serve_compiled(
    control: socket.socket, work: CompiledWork
) -> tuple[Work[Any, Any], Callable[[], None]]:
    work.warm_up()
    return work, partial(_connect_workers, control, None, work)


def _follow(
    control: socket.socket, member: Member, runner: Runner, read: Callable[[bytes], Any]
) -> None:
    """Run what the leader runs, until it closes the connection."""
    try:
        while True:
            if not member.connection.poll(IDLE_SECONDS):
                runner.release_arenas()
                trim_heap()
            member.follow(lambda message: runner.run_part(read(message)))
    except MemoryError:
        send_control(control, _error(EngineError("too little memory")))
    except VarlenError as error:
        send_control(control, _error(error))
    except (EOFError, BrokenPipeError):
        # the leader has ended, or the stage behind
        pass


def _connect_workers(control: socket.socket, leader: Leader | None, work: Work[Any, Any]) -> None:
    """Run the work of each connection that the engine sends, perhaps in forks."""
    workers: set[int] = set()
    with suppress(EOFError):
        while True:
            message, (connection, share) = receive_control(control)
            code = _exit_code(workers, message["ended"])
            try:
                pid = os.fork() if work.is_forked else 0
            except OSError as error:
                os.close(connection)
                os.close(share)
                failure = EngineError(f"no worker can be started: {error.strerror}")
                send_control(control, _error(failure))
                continue
            if pid:
                workers.add(pid)
                send_control(control, {"pid": pid, "code": code})
            elif work.is_forked:
                control.close()
                work.runner.share_cores(CoreShare(share))
                answer_orders(Connection(connection), work)
            else:
                send_control(
                    control, {"pid": os.getpid(), "code": code}, work.share(CoreShare(share).byte)
                )
                answer_orders(Connection(connection), work, leader)
            os.close(connection)
            os.close(share)
    for pid in workers:
        os.waitpid(pid, 0)


def _exit_code(workers: set[int], ended: int | None) -> int | None:
    """Forget a worker that has ended; return its exit code, negative for a signal."""
    if ended not in workers:
        return None
    workers.remove(ended)
    _, status = os.waitpid(ended, 0)
    return os.waitstatus_to_exitcode(status)


def answer_orders(
    connection: Connection, work: Work[_Order, _Part], leader: Leader | None = None
) -> NoReturn:
    """Answer batches or steps until the engine closes the connection, then end the process.

    Args:
        leader: sends them to the other stages as they arrive, if there are any.
    """
    # later lines have no engine that reads them
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(logging.Formatter("varlen: worker %(process)d: %(message)s"))
    log_by(to_stderr)

    def send_ahead(order: _Order) -> _Part:
        part = work.prepare(order)
        if part is not None and leader is not None:
            leader.send_ahead(part)
        return part

    orders = (
        Orders(connection, work.read, work.prepare)
        if leader is None or leader.stage.count == 1
        else ReadAhead(connection, work.read, send_ahead)
    )
    status, trimmed = 1, 0.0
    try:
        while True:
            order = orders.next(IDLE_SECONDS)
            if order is None:
                work.runner.release_arenas()
                trim_heap()
                order = orders.next(None)
            assert order is not None
            send_answers(connection, _answers(work, *order))
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


def _answers(work: Work[_Order, _Part], order: _Order, part: Callable[[], _Part]) -> Answers:
    rows: Sequence[Array] = ()
    problem: Problem | None = None
    trace = adapter = ""
    try:
        rows = work.run(order, part)
    except MemoryError:
        problem = "memory"
    except SkippedStepError:
        problem = "skipped"
    except AdapterFaultError as error:
        problem, trace, adapter = "adapter", str(error), error.adapter
    except Exception:
        problem, trace = "error", traceback.format_exc()
    return Answers(rows, work.runner.use(), problem, trace, adapter, work.runner.new_swaps())


def _error(error: VarlenError) -> dict[str, object]:
    return {"error": [type(error).__name__, str(error)[:_TEXT_CHARACTERS]]}


class _ToEngine(logging.Handler):
    """Sends log records to the engine, which logs them.

    Attributes:
        lines: level and text of the last ones.
    """

    def __init__(self, control: socket.socket) -> None:
        super().__init__()
        self._control = control
        self.lines: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[-_TEXT_CHARACTERS:]
            self.lines.append((record.levelno, text))
            send_control(self._control, {"log": [record.levelno, text]})
        except Exception:
            self.handleError(record)


if __name__ == "__main__":
    main()
