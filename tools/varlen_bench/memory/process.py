"""The parent's end of a worker: start it, wait for its one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from varlen_bench.harness.worker import last_line
from varlen_bench.memory.worker import Order

TIMEOUT_SECONDS = 1800.0


class WorkerError(Exception):
    """A worker failed or took too long; the message is its last words."""


def ask(order: Order, *, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """Return the figures of a worker that carries out the order.

    Raises:
        WorkerError: there are none.
    """
    threads = str(order.threads)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
    }
    module = "varlen_bench.memory.worker"
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(asdict(order))],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WorkerError(f"no figures within {timeout_seconds:g} s") from None
    if done.returncode != 0 or not done.stdout:
        raise WorkerError(last_line(done.stderr))
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures
