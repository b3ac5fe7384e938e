"""Every op on CPUs: plain torch, compiled code or oneDNN, whichever is fastest.

Names and signatures match `reference`, which specifies each op; an op without a form here is its specification. The ops
are imported when one is asked for: a process that only runs a table of calls needs none, and no torch.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    op = globals()[name] = getattr(import_module(".every_op", __name__), name)
    return op
