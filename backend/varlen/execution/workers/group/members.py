"""Links of the processes of a model that do not lead.

The leader's is in `process_group`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from torch import Tensor

from varlen.errors import EngineError
from varlen.execution.handoffs import Handoffs
from varlen.execution.workers.child import Setup
from varlen.execution.workers.connection import longest_wait
from varlen.execution.workers.group.rank_group import map_rank_memory
from varlen.program.program import NO_STATES
from varlen.program.rank import ALONE, RANKS, Rank
from varlen.program.stages import NO_STAGES, Stage

_T = TypeVar("_T")


class _Member:
    """The link of a process that does not lead.

    Attributes:
        connection: connection to the leader.
    """

    def __init__(self, connection: int) -> None:
        """Take the file descriptor of the connection."""
        self.connection = Connection(connection)

    def agree(
        self,
        decide: Callable[[], _T],  # noqa: ARG002  # of every link
        meanwhile: Callable[[], None] | None = None,
    ) -> _T:
        """Return what the leader decides."""
        # the leader waits for it
        self.connection.send_bytes(b"")
        while meanwhile is not None and not self.connection.poll():
            meanwhile()
        value: _T = json.loads(self.connection.recv_bytes())
        return value

    def send_ahead(self, work: object) -> None:
        """Do nothing: the leader sends."""

    def finish_load(self) -> None:
        """Do nothing: ranks wait in their common memory, which has the limit."""


class RankMember(_Member):
    """The link of a rank other than 0: a `RankLink`.

    Attributes:
        rank: the place of this process among the ranks.
        states: the memory in which the ranks meet.
    """

    stage = NO_STAGES
    handoffs: Handoffs | None = None

    def __init__(self, setup: Setup) -> None:
        """Take the connection and the memory of a setup."""
        connection, memory = setup.descriptors
        super().__init__(connection)
        self.rank = Rank(setup.rank, setup.config.tensor_parallel)
        self.states: Mapping[str, Tensor] = {RANKS: map_rank_memory(memory)}
        os.close(memory)

    @contextmanager
    def running(self, work: object) -> Iterator[None]:  # noqa: ARG002  # of every link
        """Return a context that does nothing: rank 0 has sent the work."""
        yield


class StageMember(_Member):
    """The link of a stage other than the last: a `RankLink`.

    Attributes:
        stage: the place of this process among the stages.
        handoffs: values that it receives and sends.
    """

    rank = ALONE
    states: Mapping[str, Tensor] = NO_STATES

    def __init__(self, setup: Setup) -> None:
        """Take the connections and the memory of a setup."""
        connection, sends, sent, *before = setup.descriptors
        super().__init__(connection)
        count = setup.config.pipeline_parallel
        self.stage = Stage(setup.rank, count)
        self.handoffs: Handoffs | None = Handoffs(before[1] if before else None, sent, places=count)
        self._next = Connection(sends)
        self._before = Connection(before[0]) if before else None
        self._config = setup.config
        # nothing is late while models load
        self._longest_wait: float | None = None

    def finish_load(self) -> None:
        """Wait no longer than the settings allow from now on: all stages have loaded."""
        self._longest_wait = longest_wait(self._config, self.stage.number)

    @contextmanager
    def running(self, work: object) -> Iterator[None]:  # noqa: ARG002
        """Return the context in which this stage runs some work, after the stage before it."""
        assert self.handoffs is not None
        if self._before is not None:
            if not self._before.poll(self._longest_wait):
                raise EngineError(
                    f"stage {self.stage.number} did not answer within"
                    f" {self._config.rank_timeout_seconds} s (rank_timeout_seconds)"
                )
            self._before.recv_bytes()
        self.handoffs.next()
        yield
        self._next.send_bytes(b"")
