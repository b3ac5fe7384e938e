"""The links of a process to the others that hold its model, of two kinds.

Ranks run at the same time, and meet in memory of all. A stage runs after the one before it: between two stages are
memory for what one hands to the other, and a connection that says when it is there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeAlias

import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.execution.handoffs import Handoffs
from varlen.execution.workers.limits import longest_wait
from varlen.memory.shared import map_shared, new_shared
from varlen.program.program import NO_STATES
from varlen.program.rank import ALONE, RANKS, Rank
from varlen.program.stages import NO_STAGES, Stage
from varlen_kernels.reference.rank_memory import LONGEST_WAIT, rank_words
from varlen_kernels.reference.ranks import failed_rank


class LateError(Exception):
    """Another process, of this number, did not come in time."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class RankLinks:
    """The links of a rank: the memory in which all ranks meet. Rank 0 leads.

    Attributes:
        rank: index of this process among the ranks.
        states: memory that all ranks share.
    """

    stage = NO_STAGES
    handoffs: Handoffs | None = None

    def __init__(self, config: EngineConfig, number: int, memory: int) -> None:
        """Map the memory of a file descriptor; see `varlen_kernels.reference.rank_memory`."""
        self.rank = Rank(number, config.tensor_parallel)
        self._memory = torch.frombuffer(map_shared(memory), dtype=torch.int64)
        os.close(memory)
        self.states: Mapping[str, Tensor] = {RANKS: self._memory}
        self._longest_wait = config.rank_timeout_seconds * 10**9

    @classmethod
    def new(cls, config: EngineConfig) -> tuple[RankLinks, list[list[int]]]:
        """Return the leader's links, and the file descriptors of each other rank."""
        memory = new_shared(8 * rank_words(config.tensor_parallel))
        others = [[os.dup(memory)] for _ in range(1, config.tensor_parallel)]
        return cls(config, 0, memory), others

    def name(self, number: int) -> str:
        """Return the name of a rank in messages."""
        return f"rank {number} of {self.rank.size}"

    def limit_waits(self) -> None:
        """Limit waits as the settings say: all have loaded."""
        self._memory[LONGEST_WAIT] = self._longest_wait

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return the context in which this rank runs.

        Ranks wait for each other in their collectives.

        Raises:
            LateError: a rank was late, and this is rank 0.
        """
        yield
        if not self.rank.number and (late := failed_rank(self._memory)) is not None:
            raise LateError(late)


class StageLinks:
    """The links of a stage to its neighbors. The last stage leads.

    Attributes:
        stage: the place of this process among the stages.
        handoffs: values that it receives and sends.
    """

    rank = ALONE
    states: Mapping[str, Tensor] = NO_STATES

    def __init__(self, config: EngineConfig, number: int, *descriptors: int) -> None:
        """Take a connection and memory for each neighbor, the one before first."""
        count = config.pipeline_parallel
        self.stage = Stage(number, count)
        before = descriptors[:2] if number else ()
        behind = descriptors[len(before) :]
        self._before = Connection(before[0]) if before else None
        self._behind = Connection(behind[0]) if behind else None
        received, sent = (ends[1] if ends else None for ends in (before, behind))
        self.handoffs = Handoffs(received, sent, places=count)
        self._config = config
        # nothing is late while models load
        self._longest_wait: float | None = None

    @classmethod
    def new(cls, config: EngineConfig) -> tuple[StageLinks, list[list[int]]]:
        """Return the leader's links, and the file descriptors of each other stage."""
        others: list[list[int]] = []
        before: list[int] = []
        for _ in range(config.pipeline_parallel - 1):
            (receives, sends), memory = socket.socketpair(), new_shared(0)
            others.append([*before, sends.detach(), memory])
            before = [receives.detach(), os.dup(memory)]
        return cls(config, config.pipeline_parallel - 1, *before), others

    def name(self, number: int) -> str:
        """Return the name of a stage in messages; the first one has number 1 there."""
        return f"stage {number + 1} of {self.stage.count}"

    def limit_waits(self) -> None:
        """Limit waits as the settings say: all have loaded."""
        self._longest_wait = longest_wait(self._config, self.stage.number)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return the context in which this stage runs, between its neighbors.

        Raises:
            LateError: the one before did not come in time.
            EOFError, OSError: it has ended.
        """
        if self._before is not None:
            if not self._before.poll(self._longest_wait):
                raise LateError(self.stage.number - 1)
            self._before.recv_bytes()
        self.handoffs.next()
        yield
        if self._behind is not None:
            self._behind.send_bytes(b"")


Links: TypeAlias = RankLinks | StageLinks


def links_of(config: EngineConfig) -> type[RankLinks] | type[StageLinks]:
    """Return the kind of links of a model that several processes hold."""
    return RankLinks if config.tensor_parallel > 1 else StageLinks
