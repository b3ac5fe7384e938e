"""The process that loads a model and forks its workers: `python -m varlen.execution.workers.host FD`.

Workers share the weights with it, page by page, until one of them writes, which none does. A worker that was killed
is forked again within milliseconds. No thread of it works at that time, so a fork leaves no lock behind.

FD is its control socket (`child`). After the model's description, each message of the engine brings the socket of a
new worker, and the memory that says whether its batch runs alone.
"""

from __future__ import annotations

import json
import os
import socket
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from varlen.execution.executor import CoreShare
from varlen.execution.workers.child import (
    MAX_MESSAGE,
    MOST_DESCRIPTORS,
    DirectOrders,
    Setup,
    answer_batches,
    run_model,
    send,
)
from varlen.execution.workers.messages import receive_batch

if TYPE_CHECKING:
    from varlen.execution.runner import Runner


def main() -> None:
    """Load the model, then fork a worker for each socket that comes."""
    run_model(_load, _fork_workers)


def _load(setup: Setup) -> Runner:
    import torch

    from varlen.execution.device import usable_cores
    from varlen.execution.runner import Runner
    from varlen.models.checkpoint_folder import Checkpoint

    settings = setup.config
    workers = settings.threads or usable_cores()
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(setup.folder, ignore_config_fields=settings.ignored_fields)
    runner = Runner(checkpoint, settings, workers=workers, measures=True)
    # once for all workers
    runner.compile()
    return runner


def _fork_workers(control: socket.socket, runner: Runner) -> None:
    workers: set[int] = set()
    while True:
        message, descriptors, *_ = socket.recv_fds(control, MAX_MESSAGE, MOST_DESCRIPTORS)
        if not message:
            break
        connection, share = descriptors
        code = _exit_code(workers, json.loads(message)["ended"])
        try:
            pid = os.fork()
        except OSError as error:
            os.close(connection)
            os.close(share)
            send(control, {"error": ["EngineError", f"no worker can be started: {error.strerror}"]})
            continue
        if not pid:
            control.close()
            runner.share_cores(CoreShare(share))
            engine = Connection(connection)
            answer_batches(
                engine,
                DirectOrders(engine, receive_batch),
                lambda batch: runner.run(*batch),
                runner.use,
                runner.release_arenas,
            )
        os.close(connection)
        os.close(share)
        workers.add(pid)
        send(control, {"pid": pid, "code": code})
    for pid in workers:
        os.waitpid(pid, 0)


def _exit_code(workers: set[int], ended: int | None) -> int | None:
    """Forget a worker that has ended; return its exit code, negative for a signal."""
    if ended not in workers:
        return None
    workers.remove(ended)
    _, status = os.waitpid(ended, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
