"""The parent's end of a worker: start it, send an order, wait for its one-line answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from varlen_bench.harness.worker import last_line

_WORKER = "varlen_bench.encoder.worker"


class WorkerError(Exception):
    """A system stopped, failed or took too long; the message is its last words."""


class WorkerProcess:
    """One system's process. Close it, also after an error.

    Args:
        spec: what the process is told at its start.
        log: what it prints goes here.
        timeout_seconds: most that an answer may take.
        module: run as the process.
    """

    def __init__(
        self, spec: dict[str, Any], log: Path, *, timeout_seconds: float, module: str = _WORKER
    ) -> None:
        self._timeout = timeout_seconds
        self._log = log
        threads = str(spec["threads"])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with log.open("w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                text=True,
            )

    def ask(self, **order: object) -> dict[str, Any]:
        """Send an order and return its answer.

        Raises:
            WorkerError: the process ended, or gave no answer in time and was killed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # answer() reports why it ended
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next answer; the first one says that the system is loaded."""
        assert self._process.stdout is not None
        timer = threading.Timer(self._timeout, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            expired = not timer.is_alive()
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if expired:
            raise WorkerError(f"no answer within {self._timeout:.0f} s")
        raise WorkerError(last_line(self._log.read_text(encoding="utf-8", errors="replace")))

    def close(self) -> None:
        """End the process and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
