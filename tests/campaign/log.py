"""The lines of a server's log that no attack explains."""

import re
from collections.abc import Sequence

# Frames, crashes, and errors as the server prints them: E, month and day, time.
_SUSPICIOUS = re.compile(
    r"Traceback|Signal \(|terminate called|double free|corrupted|Segmentation|Fatal Python|^E\d{4} "
)
# What every server without a GPU prints, and one that is stopped.
_USUAL = (r"CudaDriverHelper has not been initialized", r"^Signal \(15\) received")
_MOST_LINES = 5


def unexpected_lines(log: str, allowed: Sequence[str] = ()) -> list[str]:
    """Return lines that tell of a fault.

    Args:
        log: text of a server's log.
        allowed: patterns of lines that the attacks explain.
    """
    patterns = [re.compile(pattern) for pattern in (*_USUAL, *allowed)]
    found = [
        line
        for line in log.splitlines()
        if _SUSPICIOUS.search(line) and not any(each.search(line) for each in patterns)
    ]
    more = [f"and {len(found) - _MOST_LINES} more lines"] if len(found) > _MOST_LINES else []
    return [f"log: {line}" for line in found[:_MOST_LINES]] + more
