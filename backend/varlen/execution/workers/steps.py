"""The process that loads a model that generates and runs its steps: `python -m varlen.execution.workers.steps FD`.

It has the weights, the KV caches and the intermediates. It draws tokens and takes steps of searches that depend on the
logits alone, and the next step goes on with them. Others are chosen by the engine, from logits in memory that both map.

FD is its control socket (`child`). After the model's description, one message of the engine brings the socket of the
steps; its answer brings the memory of the logits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from varlen.execution.workers.child import (
    MAX_MESSAGE,
    DirectOrders,
    Orders,
    Setup,
    answer_batches,
    run_model,
    send,
)
from varlen.execution.workers.group.read_ahead import ReadAhead

if TYPE_CHECKING:
    from varlen.execution.packing import PackedStep
    from varlen.execution.runner import Runner
    from varlen.request.request import Float32Array, Int32Array

    # A step, or None for a check, and a function that returns the part of it that ranks or stages run.
    _Prepared: TypeAlias = tuple[PackedStep | None, Callable[[], PackedStep | None]]


def main() -> None:
    """Load the model, then run steps."""
    # a signal for the server's group is not for it
    os.setpgid(0, 0)
    run_model(_load, _run_steps)


def _load(setup: Setup) -> Runner:
    import torch

    from varlen.execution.device import cores_of_rank
    from varlen.execution.rank_link import NO_OTHERS
    from varlen.execution.runner import Runner
    from varlen.execution.token_state import NoChooser
    from varlen.execution.warm_up import warm_up, warm_up_draws
    from varlen.execution.workers.group.rank_group import RankGroup
    from varlen.execution.workers.group.stage_group import StageGroup
    from varlen.execution.workers.step_messages import step_message
    from varlen.models.checkpoint_folder import Checkpoint

    config = setup.config
    group: RankGroup[PackedStep] | StageGroup[PackedStep] | None = None
    if config.num_processes > 1:
        group = (RankGroup if config.tensor_parallel > 1 else StageGroup)(setup, step_message)
    torch.set_num_threads(cores_of_rank(config))
    checkpoint = Checkpoint.open(setup.folder, ignore_config_fields=config.ignored_fields)
    # the engine chooses what the process does not
    runner = Runner(checkpoint, config, NoChooser(), link=group or NO_OTHERS)
    warm_up(runner)
    warm_up_draws(runner)
    if group is not None:
        group.finish_load()
    return runner


def _run_steps(control: socket.socket, runner: Runner) -> None:
    from varlen.execution.cpu.runner import CpuSteps
    from varlen.execution.executor import StepOrder
    from varlen.execution.workers.step_messages import answers_of, receive_step

    message, descriptors, *_ = socket.recv_fds(control, MAX_MESSAGE, 1)
    if not message:
        return
    assert isinstance(runner.decoder.steps, CpuSteps)
    logits = runner.decoder.steps.share_logits()
    send(control, {}, [logits])
    os.close(logits)

    order = StepOrder()
    chosen: Int32Array = np.empty(0, np.int32)

    def run(prepared: _Prepared) -> Sequence[Float32Array]:
        nonlocal chosen
        step, part_of = prepared
        if step is None:
            runner.check()
            return ()
        with order.running(step.number, step.after):
            step.take_tokens(chosen)
            part = part_of()
            assert part is not None
            found = runner.decoder.run_prepared(step, part)
        answers = answers_of(found)
        chosen = answers[0].view(np.int32)
        return answers

    def prepare(step: PackedStep | None) -> PackedStep | None:
        return None if step is None else runner.decoder.prepare(step)

    def receive(connection: Connection) -> _Prepared:
        step = receive_step(connection)
        return step, partial(prepare, step)

    def send_ahead(step: PackedStep | None) -> PackedStep | None:
        part = prepare(step)
        if part is not None:
            runner.link.send_ahead(part)
        return part

    connection = Connection(descriptors[0])
    orders: Orders[_Prepared] = (
        DirectOrders(connection, receive)
        if runner.link.stage.count == 1
        else ReadAhead(connection, receive_step, send_ahead)
    )
    answer_batches(connection, orders, run, runner.use, runner.release_arenas)


if __name__ == "__main__":
    main()
