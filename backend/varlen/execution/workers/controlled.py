"""A process of a model and its control socket.

The socket carries whole JSON messages, log lines and errors among them.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from varlen import errors
from varlen.execution.workers.child import MAX_MESSAGE, MOST_DESCRIPTORS, send
from varlen.execution.workers.start import started_process

_log = logging.getLogger(__name__)

# Seconds for a process to finish a batch, and then to end.
_END_SECONDS = 10.0


class ControlledProcess:
    """A process of a model, for the process that started it. Not for two threads."""

    def __init__(self, module: str) -> None:
        """Start the process, or take the one that was started early.

        Args:
            module: module that it runs.

        Raises:
            EngineError: see `start_module`.
        """
        started = started_process(module)
        self._process, self._control = started.process, started.control

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def fileno(self) -> int:
        """Return the file descriptor of the control socket."""
        return self._control.fileno()

    def send(self, message: dict[str, object], descriptors: Sequence[int] = ()) -> None:
        """Send a message, perhaps with file descriptors.

        Raises:
            OSError: the process has ended.
        """
        send(self._control, message, descriptors)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next message that is not a log line, and its file descriptors.

        Raises:
            EOFError, OSError: the process has ended.
            VarlenError: the error that it reports.
        """
        while True:
            received = self.receive_one()
            if received is not None:
                return received

    def receive_one(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its file descriptors; None if it is a log line.

        Raises:
            EOFError, OSError, VarlenError: see `receive`.
        """
        data, descriptors, *_ = socket.recv_fds(self._control, MAX_MESSAGE, MOST_DESCRIPTORS)
        if not data:
            raise EOFError
        message = json.loads(data)
        if "log" in message:
            _log.log(*message["log"])
            return None
        if "error" in message:
            name, text = message["error"]
            raise getattr(errors, name)(text)
        return message, descriptors

    def last_words(self) -> str:
        """Return the error that a process has reported before it ended; empty without one."""
        try:
            self._control.setblocking(False)
            self.receive()
        except errors.VarlenError as error:
            return str(error)
        except (EOFError, OSError):
            pass
        return ""

    def end(self) -> None:
        """End the process, once the connections of its workers are closed."""
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
