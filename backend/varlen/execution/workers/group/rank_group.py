"""Rank 0 of a model and its links to the other ranks."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

import torch
from torch import Tensor

from varlen.execution.handoffs import Handoffs
from varlen.execution.workers.child import Setup
from varlen.execution.workers.group.process_group import ProcessGroup
from varlen.memory.shared import map_shared, new_shared
from varlen.program.rank import RANKS, Rank
from varlen.program.stages import NO_STAGES
from varlen_kernels.reference.rank_memory import LONGEST_WAIT, rank_words
from varlen_kernels.reference.ranks import failed_rank

_log = logging.getLogger(__name__)

_Work = TypeVar("_Work")


class RankGroup(ProcessGroup[_Work]):
    """The link of rank 0 to the other ranks: a `RankLink`.

    Attributes:
        rank: rank 0 of all.
        states: the memory in which the ranks meet.
    """

    stage = NO_STAGES
    handoffs: Handoffs | None = None

    def __init__(self, setup: Setup, message_of: Callable[[_Work], bytes]) -> None:
        """Start the other ranks; see `ProcessGroup`."""
        super().__init__(setup, message_of)
        self.rank = Rank(0, setup.config.tensor_parallel)
        memory = new_shared(8 * rank_words(self.rank.size))
        self._memory = map_rank_memory(memory)
        self.states: Mapping[str, Tensor] = {RANKS: self._memory}
        for number in range(1, self.rank.size):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                connection = Connection(ours.detach())
                self.start(number, connection, [theirs.fileno(), memory])
        os.close(memory)
        self.watch()

    def name_of(self, number: int) -> str:
        """Return the name of a rank in messages."""
        pid = self.pid_of(number) if number else os.getpid()
        return f"rank {number} of {self.rank.size} (process {pid})"

    def finish_load(self) -> None:
        """Wait until all ranks have loaded. From now on, none may keep others waiting."""
        super().finish_load()
        self._memory[LONGEST_WAIT] = self.config.rank_timeout_seconds * 10**9

    def send_ahead(self, work: _Work) -> None:
        """Do nothing: ranks run at the same time."""

    @contextmanager
    def running(self, work: _Work) -> Iterator[None]:
        """Return the context in which this rank runs some work; the others get it first."""
        self.send(work)
        try:
            yield
        except BaseException:
            # the others wait for this one, whatever it was
            _log.exception("rank 0 failed")
            self.end("rank 0 failed; the server's log says why")
        lost = failed_rank(self._memory)
        if lost is not None:
            self.end_late(lost)


def map_rank_memory(descriptor: int) -> Tensor:
    """Return the memory of a file descriptor in which ranks meet; see `varlen_kernels.reference.rank_memory`."""
    return torch.frombuffer(map_shared(descriptor), dtype=torch.int64)
