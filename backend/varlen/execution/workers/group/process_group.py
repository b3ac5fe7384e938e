"""The leader of a model's processes starts the others, and decides for all.

None can go on without the others: each of them has keys and values that no other one has. So if one is lost, the
process ends, the others with it, and the engine starts all of them again.
"""

from __future__ import annotations

import json
import logging
import os
import select
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Generic, NoReturn, TypeVar

from varlen.errors import VarlenError
from varlen.execution.workers.child import Setup, end_with_parent, send
from varlen.execution.workers.controlled import ControlledProcess
from varlen.execution.workers.model_process import setup_message
from varlen.execution.workers.start import RANK

_log = logging.getLogger(__name__)

# Message that says that all processes have loaded; others are work.
LOADED = b""

_T = TypeVar("_T")
_Work = TypeVar("_Work")


class ProcessGroup(Generic[_Work]):
    """The links of the leader to the other processes that hold its model.

    Attributes:
        config: the settings of the model.
    """

    def __init__(self, setup: Setup, message_of: Callable[[_Work], bytes]) -> None:
        """Prepare to start the others, which load their parts while this process loads its own.

        Args:
            setup: the setup of this process.
            message_of: returns some work as a message to the others.
        """
        # the others end with this process: the engine's thread that starts it ends after its last step
        end_with_parent()
        self.config = setup.config
        self._setup = setup
        self._message_of = message_of
        self._connections: list[Connection] = []
        self._members: dict[int, ControlledProcess] = {}
        self._loaded: SimpleQueue[int] = SimpleQueue()
        self._watcher = Thread(target=self._watch, name="varlen-watcher", daemon=True)

    def name_of(self, number: int) -> str:
        """Return the name of a process in messages, given its number."""
        raise NotImplementedError

    def start(self, number: int, ours: Connection, descriptors: Sequence[int]) -> None:
        """Start one of the others.

        Args:
            number: its number.
            ours: connection to it, for work.
            descriptors: its end of that connection, then whatever else it gets.
        """
        member = ControlledProcess(RANK)
        # their log lines would all come several times
        message = setup_message(self._setup.folder, self._setup.config)
        message |= {"log_level": "WARNING", "rank": number}
        self._connections.append(ours)
        self._members[number] = member
        try:
            member.send(message, descriptors)
        except OSError:
            # nothing watches it yet
            self._end_ended(number)

    def watch(self) -> None:
        """Watch the others, which have all been started."""
        self._watcher.start()

    def agree(self, decide: Callable[[], _T], meanwhile: Callable[[], None] | None = None) -> _T:  # noqa: ARG002
        """Return what this process decides, and tell the others; see `RankLink`."""
        try:
            for connection in self._connections:
                connection.recv_bytes()
            value = decide()
            for connection in self._connections:
                connection.send_bytes(json.dumps(value).encode())
        except (EOFError, OSError):
            self.end_with_watcher()
        return value

    def finish_load(self) -> None:
        """Wait until all have loaded."""
        for _ in self._members:
            self._loaded.get()

    def send(self, work: _Work) -> None:
        """Send the others some work."""
        self.send_message(self._message_of(work))

    def send_message(self, message: bytes) -> None:
        """Send the others a message."""
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError:
            self.end_with_watcher()
        except BaseException:
            # some have it, and some do not
            _log.exception("sending work failed")
            self.end("sending work failed; the server's log says why")

    def pid_of(self, number: int) -> int:
        """Return the process id of one of the others."""
        return self._members[number].pid

    def end_with_watcher(self) -> NoReturn:
        """End after another process has ended: the watcher knows which one, and why."""
        self._watcher.join()
        self.end("a process ended")

    def end(self, reason: str, error: str = "EngineError") -> NoReturn:
        """Tell the engine why, and end; the system then ends the others."""
        try:
            send(self._setup.control, {"error": [error, reason]})
        finally:
            os._exit(1)

    def end_late(self, number: int) -> NoReturn:
        """End because another process did not answer in time."""
        self.end(
            f"{self.name_of(number)} did not answer within {self.config.rank_timeout_seconds} s"
            " (rank_timeout_seconds)"
        )

    def _watch(self) -> None:
        """Read what the others report; end all if one ends."""
        arrivals = select.poll()
        numbers = {member.fileno(): number for number, member in self._members.items()}
        for descriptor in numbers:
            arrivals.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in arrivals.poll():
                self._read(numbers[descriptor])

    def _read(self, number: int) -> None:
        """Read one message of another process."""
        member = self._members[number]
        try:
            # the only message without a log line or an error says that it has loaded
            if member.receive_one() is not None:
                self._loaded.put(number)
        except VarlenError as error:
            self.end(f"{self.name_of(number)}: {error}", type(error).__name__)
        except (EOFError, OSError):
            self._end_ended(number)

    def _end_ended(self, number: int) -> NoReturn:
        """End because another process has ended."""
        member = self._members[number]
        member.end()
        self.end(f"{self.name_of(number)} ended with code {member.code}")
