"""Rank 0 of a model starts the others, and decides for all.

All ranks have the keys and values of a part of the heads, so no rank can go on without the others: if one
is lost, the process ends, the others with it, and the engine starts all of them again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from varlen.errors import VarlenError
from varlen.execution.workers.child import Setup, end_with_parent, send
from varlen.execution.workers.controlled import ControlledProcess
from varlen.execution.workers.model_process import setup_message
from varlen.execution.workers.start import RANK
from varlen.memory.shared import map_shared, new_shared
from varlen.program.rank import RANKS, Rank
from varlen_kernels.reference.rank_memory import LONGEST_WAIT, rank_words
from varlen_kernels.reference.ranks import failed_rank

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Work = TypeVar("_Work")


class RankGroup(Generic[_Work]):
    """The link of rank 0 to the other ranks: a `RankLink`.

    Attributes:
        rank: rank 0 of all.
        states: the memory in which the ranks meet.
    """

    def __init__(self, setup: Setup, message_of: Callable[[_Work], bytes]) -> None:
        """Start the other ranks, which load their parts while this process loads its own.

        Args:
            setup: the setup of this process.
            message_of: returns some work as a message to the other ranks.
        """
        # the others end with this process: the engine's thread that starts it ends after its last step
        end_with_parent()
        self.rank = Rank(0, setup.config.tensor_parallel)
        self._control = setup.control
        self._message_of = message_of
        self._wait_seconds = setup.config.rank_timeout_seconds
        memory = new_shared(8 * rank_words(self.rank.size))
        self._memory = map_rank_memory(memory)
        self.states: Mapping[str, Tensor] = {RANKS: self._memory}
        self._connections: list[Connection] = []
        self._members: dict[int, ControlledProcess] = {}
        self._loaded: SimpleQueue[int] = SimpleQueue()
        for number in range(1, self.rank.size):
            self._start(number, setup, memory)
        os.close(memory)
        self._watcher = Thread(target=self._watch, name="varlen-ranks", daemon=True)
        self._watcher.start()

    def agree(self, decide: Callable[[], _T], meanwhile: Callable[[], None] | None = None) -> _T:  # noqa: ARG002
        """Return what this rank decides, and tell the others."""
        try:
            for connection in self._connections:
                connection.recv_bytes()
            value = decide()
            for connection in self._connections:
                connection.send_bytes(json.dumps(value).encode())
        except (EOFError, OSError):
            self._end_with_watcher()
        return value

    def finish_load(self) -> None:
        """Wait until all ranks have loaded. From now on, none may keep others waiting."""
        for _ in self._members:
            self._loaded.get()
        self._memory[LONGEST_WAIT] = self._wait_seconds * 10**9

    @contextmanager
    def running(self, work: _Work) -> Iterator[None]:
        """Return the context in which this rank runs some work; the others get it first."""
        message = self._message_of(work)
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError:
            self._end_with_watcher()
        try:
            yield
        except BaseException:
            # the others wait for this one, whatever it was
            _log.exception("rank 0 failed")
            self._end("rank 0 failed; the server's log says why")
        lost = failed_rank(self._memory)
        if lost is not None:
            self._end(
                f"{self._name(lost)} did not answer within {self._wait_seconds} s (rank_timeout_seconds)"
            )

    def _start(self, number: int, setup: Setup, memory: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            member = ControlledProcess(RANK)
            message = setup_message(setup.folder, setup.config)
            # their log lines would all come several times
            message |= {"log_level": "WARNING", "rank": number}
            member.send(message, [theirs.fileno(), memory])
            self._connections.append(Connection(ours.detach()))
            self._members[number] = member

    def _watch(self) -> None:
        """Read what other ranks report; end all ranks if one ends."""
        arrivals = select.poll()
        numbers = {member.fileno(): number for number, member in self._members.items()}
        for descriptor in numbers:
            arrivals.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in arrivals.poll():
                number = numbers[descriptor]
                self._read(number)

    def _read(self, number: int) -> None:
        """Read one message of another rank."""
        member = self._members[number]
        try:
            # the only message without a log line or an error says that it has loaded
            if member.receive_one() is not None:
                self._loaded.put(number)
        except VarlenError as error:
            self._end(f"{self._name(number)}: {error}", type(error).__name__)
        except (EOFError, OSError):
            member.end()
            self._end(f"{self._name(number)} ended with code {member.code}")

    def _name(self, number: int) -> str:
        if not number:
            return f"rank 0 of {self.rank.size} (process {os.getpid()})"
        return f"rank {number} of {self.rank.size} (process {self._members[number].pid})"

    def _end_with_watcher(self) -> NoReturn:
        """End after another rank has ended: the watcher knows which one, and why."""
        self._watcher.join()
        self._end("a rank ended")

    def _end(self, reason: str, error: str = "EngineError") -> NoReturn:
        """Tell the engine why, and end; the system then ends the others."""
        try:
            send(self._control, {"error": [error, reason]})
        finally:
            os._exit(1)


def map_rank_memory(descriptor: int) -> Tensor:
    """Return the memory of a file descriptor in which ranks meet; see `varlen_kernels.reference.rank_memory`."""
    return torch.frombuffer(map_shared(descriptor), dtype=torch.int64)
