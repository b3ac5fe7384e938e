"""Compile kernels in other processes, before this process launches them.

The processes see no GPU: they compile with the fake driver of `dry_run`, and leave the result in Triton's cache on
disk. A launch in this process then loads it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeAlias

import torch

from varlen_bench.dry_run import SHARED_MEMORY_LIMITS, dry_run

# Returns the same list of calls of launchers, on CPU tensors, in every process. Must be picklable.
Runs: TypeAlias = Callable[[], Sequence[Callable[[], object]]]

_runs: Sequence[Callable[[], object]] = ()


class CompileAhead:
    """The compilations in progress; their numbers are indices into the list of runs."""

    def __init__(self, futures: Sequence["Future[int]"]) -> None:
        self._futures = futures

    def wait(self, numbers: Iterable[int], seconds: float) -> int:
        """Return how many kernels these runs compiled, after at most `seconds`.

        A run that has not ended, or failed, counts nothing: its launch will compile or fail again.
        """
        chosen = [self._futures[number] for number in numbers] if self._futures else []
        done = wait(chosen, timeout=seconds).done
        return sum(future.result() for future in done if future.exception() is None)


@contextmanager
def compile_ahead(
    runs: Runs, count: int, capability: str, processes: int
) -> Iterator[CompileAhead]:
    """Yield the compilations of `runs`, in its order; those not begun end with the context.

    Args:
        count: the length of the list.
        capability: compute capability of the GPU, such as "sm_90"; nothing is compiled for an unknown one.
        processes: 0 compiles nothing.
    """
    arch = int(capability.removeprefix("sm_")) if capability.startswith("sm_") else 0
    if not processes or arch not in SHARED_MEMORY_LIMITS:
        yield CompileAhead([])
        return
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_start, initargs=(runs, count)
    )
    try:
        yield CompileAhead([pool.submit(_compile, number, arch) for number in range(count)])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(runs: Runs, count: int) -> None:
    """Prepare a process: no GPU, one thread, the list of runs.

    Raises:
        RuntimeError: the list has another length here.
    """
    global _runs  # noqa: PLW0603  # the pool has no other place for the state of a process
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    _runs = runs()
    if len(_runs) != count:
        raise RuntimeError(f"this process lists {len(_runs)} runs; the one that times has {count}")


def _compile(number: int, arch: int) -> int:
    """Return the number of kernels that a run added to the cache."""
    with dry_run(arch) as compiled:
        _runs[number]()
    return sum(not compilation.cached for compilation in compiled)
