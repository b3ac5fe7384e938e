"""Rank 0 of a model of one step that several ranks hold: `python -m varlen.execution.workers.batches FD`.

It runs one batch at a time, with the other ranks, and forks no workers: each of them would need ranks of its own.

FD is its control socket (`child`). After the model's description, one message of the engine brings the connection for
batches.
"""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from varlen.execution.workers.child import (
    MAX_MESSAGE,
    MOST_DESCRIPTORS,
    Setup,
    answer_batches,
    run_model,
    send,
)
from varlen.execution.workers.messages import batch_message, receive_batch

if TYPE_CHECKING:
    from varlen.execution.runner import Runner


def main() -> None:
    """Load the model, then run batches."""
    run_model(_load, _run_batches)


def _load(setup: Setup) -> Runner:
    import torch

    from varlen.execution.device import cores_of_rank
    from varlen.execution.runner import Runner, WorkOfBatch
    from varlen.execution.workers.rank_group import RankGroup
    from varlen.models.checkpoint_folder import Checkpoint

    config = setup.config
    group: RankGroup[WorkOfBatch] = RankGroup(setup, lambda work: batch_message(*work))
    torch.set_num_threads(cores_of_rank(config))
    checkpoint = Checkpoint.open(setup.folder, ignore_config_fields=config.ignored_fields)
    runner = Runner(checkpoint, config, measures=True, link=group)
    runner.compile()
    group.finish_load()
    return runner


def _run_batches(control: socket.socket, runner: Runner) -> None:
    message, descriptors, *_ = socket.recv_fds(control, MAX_MESSAGE, MOST_DESCRIPTORS)
    if not message:
        return
    connection, share = descriptors
    # the one batch always has all cores
    os.close(share)
    send(control, {"pid": os.getpid(), "code": None})
    answer_batches(
        Connection(connection),
        receive_batch,
        lambda batch: runner.run(*batch),
        runner.use,
        runner.release_arena,
    )


if __name__ == "__main__":
    main()
