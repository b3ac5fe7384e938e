"""The process of a rank other than 0: `python -m varlen.execution.workers.rank FD`.

It loads its part of the model and runs what rank 0 tells it to. It has no scheduler, tokenizer or sampler.

FD is its control socket (`child`), from rank 0. The message that says what to load brings the connection for work, and
the memory in which the ranks meet. The process ends with rank 0's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

from varlen.execution.workers.child import (
    IDLE_SECONDS,
    LoadedModel,
    Setup,
    end_with_parent,
    run_model,
)
from varlen.memory.heap import trim_heap
from varlen.program.rank import RANKS, Rank

if TYPE_CHECKING:
    import socket

    from torch import Tensor

    from varlen.execution.model_info import ModelInfo, StepInfo
    from varlen.models.checkpoint_folder import Checkpoint

_T = TypeVar("_T")


class RankMember:
    """The link of a rank other than 0: a `RankLink`.

    Attributes:
        rank: the place of this process among the ranks.
        states: the memory in which the ranks meet.
        connection: connection to rank 0.
    """

    def __init__(self, rank: Rank, connection: Connection, memory: Tensor) -> None:
        self.rank = rank
        self.states: Mapping[str, Tensor] = {RANKS: memory}
        self.connection = connection

    def agree(
        self,
        decide: Callable[[], _T],  # noqa: ARG002  # of every link
        meanwhile: Callable[[], None] | None = None,
    ) -> _T:
        """Return what rank 0 decides."""
        # rank 0 waits for it
        self.connection.send_bytes(b"")
        while meanwhile is not None and not self.connection.poll():
            meanwhile()
        value: _T = json.loads(self.connection.recv_bytes())
        return value

    @contextmanager
    def running(self, work: object) -> Iterator[None]:  # noqa: ARG002  # of every link
        """Return a context that does nothing: rank 0 has sent the work."""
        yield


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a model.

    Attributes:
        model: the part.
        connection: brings the messages of rank 0.
        run: runs the work of a message.
        release: returns the memory of intermediates to the system.
    """

    model: LoadedModel
    connection: Connection
    run: Callable[[bytes], object]
    release: Callable[[], None]

    @property
    def info(self) -> ModelInfo | StepInfo:
        """Model facts."""
        return self.model.info


def main() -> None:
    """Load a part of a model, then run what rank 0 runs."""
    end_with_parent()
    run_model(_load, _follow)


def _load(setup: Setup) -> _Part:
    import torch

    from varlen.execution.device import cores_of_rank
    from varlen.execution.workers.rank_group import map_rank_memory
    from varlen.models.checkpoint_folder import Checkpoint
    from varlen.tasks import ITERATIVE_TASKS

    config, (connection, memory) = setup.config, setup.descriptors
    rank = Rank(setup.rank, config.tensor_parallel)
    link = RankMember(rank, Connection(connection), map_rank_memory(memory))
    os.close(memory)
    torch.set_num_threads(cores_of_rank(config))
    checkpoint = Checkpoint.open(setup.folder, ignore_config_fields=config.ignored_fields)
    generates = (config.task or checkpoint.task) in ITERATIVE_TASKS
    return (_load_steps if generates else _load_batches)(checkpoint, setup, link)


def _load_steps(checkpoint: Checkpoint, setup: Setup, link: RankMember) -> _Part:
    from varlen.execution.step_model import NoChoice
    from varlen.execution.step_runner import StepRunner
    from varlen.execution.workers.step_messages import step_of

    runner = StepRunner(checkpoint, setup.config, NoChoice(), link=link)

    def run(message: bytes) -> None:
        step = step_of(message)
        assert step is not None
        runner.run_part(step)

    return _Part(runner, link.connection, run, runner.release_arenas)


def _load_batches(checkpoint: Checkpoint, setup: Setup, link: RankMember) -> _Part:
    from varlen.execution.runner import Runner
    from varlen.execution.workers.messages import batch_of

    runner = Runner(checkpoint, setup.config, measures=True, link=link)
    runner.compile_products()
    return _Part(
        runner,
        link.connection,
        lambda message: runner.run(*batch_of(message)),
        runner.release_arena,
    )


def _follow(control: socket.socket, part: _Part) -> None:  # noqa: ARG001  # of every process
    """Run what rank 0 runs, until it closes the connection."""
    try:
        while True:
            if not part.connection.poll(IDLE_SECONDS):
                part.release()
                trim_heap()
            part.run(part.connection.recv_bytes())
    except EOFError:
        pass


if __name__ == "__main__":
    main()
