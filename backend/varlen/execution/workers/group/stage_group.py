"""The last stage of a model and its links to the other stages.

Between two stages are memory for what one hands to the other, and a connection that says when it is there.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from torch import Tensor

from varlen.execution.handoffs import Handoffs
from varlen.execution.workers.child import Setup
from varlen.execution.workers.connection import longest_wait
from varlen.execution.workers.group.process_group import LOADED, ProcessGroup
from varlen.memory.shared import new_shared
from varlen.program.program import NO_STATES
from varlen.program.rank import ALONE
from varlen.program.stages import Stage

_log = logging.getLogger(__name__)

_Work = TypeVar("_Work")


class StageGroup(ProcessGroup[_Work]):
    """The link of the last stage to the others: a `RankLink`.

    Attributes:
        stage: the last stage.
        handoffs: values that it receives.
    """

    rank = ALONE
    states: Mapping[str, Tensor] = NO_STATES

    def __init__(self, setup: Setup, message_of: Callable[[_Work], bytes]) -> None:
        """Start the other stages; see `ProcessGroup`."""
        super().__init__(setup, message_of)
        count = setup.config.pipeline_parallel
        self.stage = Stage(count - 1, count)
        self._is_ahead = False
        # nothing is late while models load
        self._longest_wait: float | None = None
        before: list[int] = []
        for number in range(count - 1):
            ours, theirs = socket.socketpair()
            sends, receives = socket.socketpair()
            memory = new_shared(0)
            with ours, theirs:
                given = [theirs.fileno(), sends.detach(), memory, *before]
                self.start(number, Connection(ours.detach()), given)
            # the stage has its own now
            for descriptor in (given[1], *before):
                os.close(descriptor)
            before = [receives.detach(), memory]
        self._before, memory = Connection(before[0]), before[1]
        self.handoffs: Handoffs | None = Handoffs(memory, None, places=count)
        self.watch()

    def name_of(self, number: int) -> str:
        """Return the name of a stage in messages; the first one has number 1 there."""
        pid = self.pid_of(number) if number < self.stage.number else os.getpid()
        return f"stage {number + 1} of {self.stage.count} (process {pid})"

    def finish_load(self) -> None:
        """Wait until all stages have loaded. From now on, none may keep others waiting."""
        super().finish_load()
        self._longest_wait = longest_wait(self.config, self.stage.number)
        self.send_message(LOADED)

    def send_ahead(self, work: _Work) -> None:
        """Send the others what this stage runs later; from another thread than `running`."""
        self._is_ahead = True
        self.send(work)

    @contextmanager
    def running(self, work: _Work) -> Iterator[None]:
        """Return the context in which this stage runs some work, after the stage before it."""
        assert self.handoffs is not None
        if not self._is_ahead:
            self.send(work)
        last = self.stage.number - 1
        try:
            is_there = self._before.poll(self._longest_wait)
            if is_there:
                self._before.recv_bytes()
        except (EOFError, OSError):
            self.end_with_watcher()
        if not is_there:
            self.end_late(last)
        self.handoffs.next()
        try:
            yield
        except BaseException:
            # the others have run it, and their keys and values with it
            _log.exception("the last stage failed")
            self.end("the last stage failed; the server's log says why")
