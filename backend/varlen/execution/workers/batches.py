"""The leader of a model of one step that several processes hold: `python -m varlen.execution.workers.batches FD`.

It runs one batch at a time, with the other ranks or after the other stages, and forks no workers: each of them would
need others of its own.

FD is its control socket (`child`). After the model's description, one message of the engine brings the connection for
batches.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

from varlen.execution.workers.child import (
    MAX_MESSAGE,
    MOST_DESCRIPTORS,
    DirectOrders,
    Orders,
    Setup,
    answer_batches,
    run_model,
    send,
)
from varlen.execution.workers.group.read_ahead import ReadAhead
from varlen.execution.workers.messages import batch_message, receive_batch

if TYPE_CHECKING:
    from varlen.execution.runner import Runner
    from varlen.request.request import Float32Array, Prompt, RequestOptions

    # Prompts and options.
    _Batch: TypeAlias = tuple[Sequence[Prompt], Sequence[RequestOptions]]
    # A batch, and a function that raises what sending it to other stages has raised.
    _Order: TypeAlias = tuple[_Batch, Callable[[], None]]


def main() -> None:
    """Load the model, then run batches."""
    run_model(_load, _run_batches)


def _load(setup: Setup) -> Runner:
    import torch

    from varlen.execution.device import cores_of_rank
    from varlen.execution.runner import Runner
    from varlen.execution.workers.group.rank_group import RankGroup
    from varlen.execution.workers.group.stage_group import StageGroup
    from varlen.models.checkpoint_folder import Checkpoint

    config = setup.config
    group_of = RankGroup if config.tensor_parallel > 1 else StageGroup
    group: RankGroup[_Batch] | StageGroup[_Batch] = group_of(
        setup, lambda work: batch_message(*work)
    )
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
    engine = Connection(connection)

    def receive(connection: Connection) -> _Order:
        return receive_batch(connection), lambda: None

    def run(order: _Order) -> Sequence[Float32Array]:
        batch, sent = order
        sent()
        return runner.run(*batch)

    orders: Orders[_Order] = (
        DirectOrders(engine, receive)
        if runner.link.stage.count == 1
        else ReadAhead(engine, receive_batch, runner.link.send_ahead)
    )
    answer_batches(engine, orders, run, runner.use, runner.release_arenas)


if __name__ == "__main__":
    main()
