"""A process that holds a part of a model, and does not lead: `python -m varlen.execution.workers.group.rank FD`.

It is a rank other than 0, or a stage other than the last. It loads its part and runs what the leader tells it to. It
has no scheduler, tokenizer or sampler.

FD is its control socket (`child`), from the leader. The message that says what to load brings the connection for work.
A rank gets the memory in which the ranks meet. A stage gets a connection to the next stage and memory for it, and the
same from the stage before. The process ends with the leader's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.errors import VarlenError
from varlen.execution.workers.child import (
    IDLE_SECONDS,
    LoadedModel,
    Setup,
    end_with_parent,
    run_model,
    send,
)
from varlen.memory.heap import trim_heap

if TYPE_CHECKING:
    import socket

    from varlen.execution.model_info import ModelInfo
    from varlen.execution.workers.group.members import RankMember, StageMember


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a model that this process holds.

    Attributes:
        model: the part.
        link: link to the leader.
        run: runs the work of a message.
        release: returns the memory of intermediates to the system.
    """

    model: LoadedModel
    link: RankMember | StageMember
    run: Callable[[bytes], object]
    release: Callable[[], None]

    @property
    def info(self) -> ModelInfo:
        """Model facts."""
        return self.model.info


def main() -> None:
    """Load a part of a model, then run what the leader runs."""
    end_with_parent()
    run_model(_load, _follow)


def _load(setup: Setup) -> _Part:
    import torch

    from varlen.execution.device import cores_of_rank
    from varlen.execution.runner import Runner
    from varlen.execution.token_state import NoChooser
    from varlen.execution.workers.group.members import RankMember, StageMember
    from varlen.execution.workers.messages import batch_of
    from varlen.execution.workers.step_messages import step_of
    from varlen.models.checkpoint_folder import Checkpoint
    from varlen.tasks import ITERATIVE_TASKS

    config = setup.config
    link = StageMember(setup) if config.pipeline_parallel > 1 else RankMember(setup)
    torch.set_num_threads(cores_of_rank(config))
    checkpoint = Checkpoint.open(setup.folder, ignore_config_fields=config.ignored_fields)
    generates = (config.task or checkpoint.task) in ITERATIVE_TASKS
    choice = NoChooser() if generates else None
    runner = Runner(checkpoint, config, choice, measures=True, link=link)
    if not generates:
        runner.compile_products()

    def run(message: bytes) -> None:
        work = step_of(message) if generates else batch_of(message)
        assert work is not None
        runner.run_part(work)

    return _Part(runner, link, run, runner.release_arenas)


def _follow(control: socket.socket, part: _Part) -> None:
    """Run what the leader runs, until it closes the connection."""
    from varlen.execution.workers.group.process_group import LOADED

    try:
        while True:
            if not part.link.connection.poll(IDLE_SECONDS):
                part.release()
                trim_heap()
            message = part.link.connection.recv_bytes()
            if message == LOADED:
                part.link.finish_load()
            else:
                part.run(message)
    except MemoryError:
        send(control, {"error": ["EngineError", "too little memory"]})
    except VarlenError as error:
        send(control, {"error": [type(error).__name__, str(error)]})
    except (EOFError, BrokenPipeError):
        # the leader has ended, or the stage behind
        pass


if __name__ == "__main__":
    main()
