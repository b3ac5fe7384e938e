"""Threads of one core each, for batches that are shared out by `shares.py`."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

_T = TypeVar("_T")


class Lanes:
    """Runs tasks side by side, each in a thread where torch uses one core."""

    def __init__(self, count: int) -> None:
        cores = torch.get_num_threads()
        self._lanes = [
            ThreadPoolExecutor(1, f"varlen-lane-{lane}", _use_one_core) for lane in range(count)
        ]
        # started now; torch takes the last setting as the default of threads to come, so it is put back
        self.run([_nothing] * count)
        torch.set_num_threads(cores)

    def run(self, tasks: Sequence[Callable[[], _T]]) -> list[_T]:
        """Return the results of at most as many tasks as there are lanes; task i runs in lane i.

        Raises:
            Exception: the first task's that failed, once none runs any more.
        """
        running = [lane.submit(task) for lane, task in zip(self._lanes, tasks, strict=False)]
        wait(running)
        return [future.result() for future in running]

    def close(self) -> None:
        """Stop the threads."""
        for lane in self._lanes:
            lane.shutdown()


def _use_one_core() -> None:
    # a thread takes torch's default when it first asks, even over a setting of its own: so ask, then set
    torch.get_num_threads()
    torch.set_num_threads(1)


def _nothing() -> None:
    pass
