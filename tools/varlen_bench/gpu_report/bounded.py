"""Stages in turn, each with a time limit, all within a budget."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# A stage at its limit is interrupted, so that it prints and writes what it has, and later killed.
GRACE_SECONDS = 10.0
# A stage with less time does not start: just importing torch takes seconds.
_LEAST_SECONDS = 10.0

Status = Literal["ok", "failed", "out of time", "skipped"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A command of a report.

    Attributes:
        command: returns the command line for the seconds that it gets.
        checks: whether a failure means that a kernel is wrong.
        missing: returns why the stage cannot run on this machine; empty if it can.
    """

    name: str
    seconds: float
    command: Callable[[float], Sequence[str]]
    checks: bool = False
    missing: Callable[[], str] = lambda: ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def log_name(self) -> str:
        """The file of its output."""
        return f"{self.name.replace(' ', '_')}.log"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended; `note` is its exit status, or why it was skipped."""

    stage: Stage
    status: Status
    seconds: float = 0.0
    note: str = ""

    @property
    def is_passed(self) -> bool:
        """Whether it did all that this machine can do."""
        return self.status in {"ok", "skipped"}


def run_stages(
    stages: Sequence[Stage],
    seconds: float,
    folder: Path,
    save: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """Return the outcome of every stage.

    Args:
        seconds: time for all stages together; time left by a stage goes to the next.
        save: called after each stage with the outcomes so far.
    """
    # a shell ignores interrupts in what it starts in the background, and so would every stage
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for stage in stages:
        left = end - time.monotonic() - GRACE_SECONDS
        outcomes.append(_run_stage(stage, min(stage.seconds, left), folder / stage.log_name))
        save(outcomes)
    return outcomes


def _run_stage(stage: Stage, seconds: float, log: Path) -> Outcome:
    if reason := stage.missing():
        return Outcome(stage, "skipped", note=reason)
    if seconds < min(_LEAST_SECONDS, stage.seconds):
        return Outcome(stage, "out of time", note=f"{max(seconds, 0):.0f} s were left")
    began = time.monotonic()
    try:
        status = run_bounded(stage.command(seconds), seconds, log, stage.environment)
    except OSError as error:  # later stages may succeed
        return Outcome(stage, "failed", note=str(error))
    passed = time.monotonic() - began
    if status is None:
        return Outcome(stage, "out of time", passed, f"the limit was {seconds:.0f} s")
    if status:
        return Outcome(stage, "failed", passed, f"exit status {status}")
    return Outcome(stage, "ok", passed)


def run_bounded(
    command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str]
) -> int | None:
    """Return the exit status of a command; None if it was stopped.

    All its processes end.

    Args:
        seconds: then it is interrupted as by Ctrl-C, and killed 10 seconds later.
        log: receives its output.

    Raises:
        OSError: the program does not exist.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            return None
        finally:
            # its own children too, and also if this process is interrupted
            _kill_group(process.pid)
            process.wait()


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
