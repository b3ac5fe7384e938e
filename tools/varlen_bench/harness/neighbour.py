"""Other work on the machine: a process that keeps half a core busy.

A server never has the machine to itself: its clients and other services use the same cores.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It computes for 5 ms, then sleeps for 5 ms, and ends with its parent.
_WORK = """
import os, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        pass
    time.sleep(0.005)
"""


@contextmanager
def half_a_busy_core() -> Iterator[None]:
    """Keep half a core busy inside a `with`."""
    with subprocess.Popen([sys.executable, "-c", _WORK]) as process:
        try:
            yield
        finally:
            process.kill()
