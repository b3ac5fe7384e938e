"""Worker processes: one measured system each, so that memory, threads and allocators do not mix.

The parent starts a module with a JSON argument. The worker answers once when it is ready, and then each order, a JSON
line on its stdin, with a JSON line. What libraries print goes to the worker's log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
# Longest time of one answer: all requests of a large encoder.
_ANSWER_SECONDS = 1800.0
_CLOSE_SECONDS = 5.0
# The source root of the benchmarks.
_TOOLS = str(Path(__file__).parents[2])


class WorkerError(Exception):
    """A worker failed; the last line of its log."""


class LateError(WorkerError):
    """A worker gave no answer in time and was killed."""


class WorkerProcess:
    """A process that runs `python -m module`, which calls `run_worker`; used inside `with`.

    Args:
        python: interpreter of another environment, which gets no packages of this one; None: this one.
        timeout: longest time of one answer, in seconds.
    """

    def __init__(
        self,
        module: str,
        argument: Message,
        log: Path,
        *,
        threads: int,
        python: Path | None = None,
        timeout: float = _ANSWER_SECONDS,
    ) -> None:
        self._timeout = timeout
        self._log = log
        self._is_ready = False
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path if python is None else [_TOOLS])),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with log.open("w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(
                [python or sys.executable, "-m", module, json.dumps(argument)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        # an order that a dead worker did not read is flushed again
        with suppress(BrokenPipeError):
            self._orders.close()
        self._wait()
        self._answers.close()

    def ask(self, **order: object) -> Message:
        """Send an order and return its answer, once the worker is ready.

        Raises:
            WorkerError: the process ended, or gave no answer in time and was killed.
        """
        if not self._is_ready:
            self._answer()
            self._is_ready = True
        # if the pipe is broken, reading the answer finds out why
        with suppress(BrokenPipeError):
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()
        return self._answer()

    def _answer(self) -> Message:
        timer = threading.Timer(self._timeout, self._process.kill)
        timer.start()
        try:
            line = self._answers.readline()
        finally:
            expired = not timer.is_alive()
            timer.cancel()
        if line:
            answer: Message = json.loads(line)
            return answer
        if expired:
            raise LateError(f"no answer within {self._timeout:g} s")
        self._wait()  # its log is complete only then
        raise WorkerError(last_line(self._log.read_text(encoding="utf-8", errors="replace")))

    def _wait(self) -> None:
        try:
            self._process.wait(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ask_once(
    module: str, argument: Message, log: Path, *, threads: int, **order: object
) -> Message:
    """Return the answer to the one order of a worker process.

    Raises:
        WorkerError: as in `WorkerProcess.ask`.
    """
    with WorkerProcess(module, argument, log, threads=threads) as process:
        return process.ask(**order)


def run_worker(start: Callable[[Message], Callable[[Message], Message]]) -> None:
    """Answer orders until stdin ends; the main function of a worker module.

    Args:
        start: prepares the system from the worker's argument and returns the function that answers an order.
    """
    # libraries print to stdout: keep the pipe for answers and send the rest to stderr
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        handle = start(json.loads(sys.argv[1]))
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(handle(json.loads(line))), file=answers, flush=True)


def run_once(measure: Callable[[Message], Message]) -> None:
    """Answer any order with what `measure` returns for the worker's argument."""
    run_worker(lambda argument: lambda _: measure(argument))


def last_line(text: str) -> str:
    """Return the last line of `text` that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
