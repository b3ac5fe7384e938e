"""Processes that tests end, or wait for."""

import time
from pathlib import Path

# Longer than the end of any process takes on a busy machine.
_SECONDS = 60.0


def is_gone(pid: int) -> bool:
    """Wait until a process has ended; return whether it has."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        try:
            # a zombie has ended too
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False
