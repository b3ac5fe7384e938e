"""Compiles every op of this CPU ahead, on all cores: `python -m varlen_kernels.cpu.compile_all`.

Otherwise the first start of each kind of model compiles what it needs, on one core. `machine_code` says where the code
is stored. It holds for this CPU and these sources.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from varlen_kernels.cpu.compiled_ops import has_compiled_ops
from varlen_kernels.cpu.threads import usable_cores

# The functions that take longest: they begin first, so that cores end at about the same time.
_LONGEST = ("attend_distances", "attend", "attend_chunks", "multiply")


def compile_all() -> None:
    """Compile all ops, and print how long it takes.

    Raises:
        RuntimeError: an op cannot be compiled or stored here.
    """
    began = time.perf_counter()
    if not has_compiled_ops():
        raise RuntimeError("no ops can be compiled here")
    from varlen_kernels.cpu.entries import MAKERS

    names = sorted(MAKERS, key=lambda name: not name.startswith(_LONGEST))
    count = min(usable_cores(), len(names))
    with ProcessPoolExecutor(count, get_context("fork")) as processes:
        for done in as_completed([processes.submit(_compile, name) for name in names]):
            try:
                name, seconds = done.result()
            except Exception as error:
                raise RuntimeError(f"an op cannot be compiled: {error!r}") from error
            print(f"compiled {name} in {seconds:.1f} s", flush=True)
    print(f"compiled all ops of this CPU in {time.perf_counter() - began:.0f} s")


def _compile(name: str) -> tuple[str, float]:
    from varlen_kernels.cpu.machine_code import address_of

    began = time.perf_counter()
    address_of(name)
    return name, time.perf_counter() - began


if __name__ == "__main__":
    try:
        compile_all()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
