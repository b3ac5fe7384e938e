"""Processes of a replica that are killed, and how the replica is brought back.

A supervisor restarts a server that has ended, and one whose probes fail. A worker process is replaced by its model.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from varlen_bench.harness.resident import model_process
from varlen_bench.replicas.proxies import Replica

_WORKER = "varlen.execution.workers.child"


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of process that is killed.

    Attributes:
        strike: kills the process of a model, given the replica and the name of the model.
        repair_after: seconds until the server is replaced; None if the replica recovers by itself.
    """

    strike: Callable[[Replica, str], None]
    repair_after: float | None = None


def _kill_server(replica: Replica, model: str) -> None:
    del model
    replica.kill()


def _kill_stub(replica: Replica, model: str) -> None:
    os.kill(model_process(replica.running.pid, model), signal.SIGKILL)


def _kill_workers(replica: Replica, model: str) -> None:
    for worker in worker_processes(model_process(replica.running.pid, model)):
        os.kill(worker, signal.SIGKILL)


# By the name of the event in rows.
FAULTS: dict[str, Fault] = {
    "server": Fault(_kill_server, repair_after=2.0),
    "worker": Fault(_kill_workers),
    # two probes, as deploy/ has them, and a few seconds more, in which calls in flight have to fail
    "stub": Fault(_kill_stub, repair_after=8.0),
}


def worker_processes(stub: int) -> list[int]:
    """Return the ids of the worker processes of a model's stub."""
    return [
        worker
        for host in _children(stub)
        if _WORKER in Path(f"/proc/{host}/cmdline").read_text("utf-8").split("\0")
        for worker in _children(host)
    ]


def _children(pid: int) -> list[int]:
    # /proc lists the children of each thread apart
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [
        int(child) for each in threads for child in (each / "children").read_text("utf-8").split()
    ]
