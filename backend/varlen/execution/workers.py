"""Worker threads of one core each, for the sub-batches of `split_batch`."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

_T = TypeVar("_T")


class WorkerThreads:
    """Runs tasks in parallel, each in a thread where torch uses one core."""

    def __init__(self, count: int) -> None:
        cores = torch.get_num_threads()
        self._workers = [
            ThreadPoolExecutor(1, f"varlen-worker-{number}", _use_one_core)
            for number in range(count)
        ]
        # started now; torch takes the last setting as the default of later threads, so it is restored
        self.run([_nothing] * count)
        torch.set_num_threads(cores)

    def run(self, tasks: Sequence[Callable[[], _T]]) -> list[_T]:
        """Return the results of the tasks; task i runs in worker i.

        Args:
            tasks: at most one per worker.

        Raises:
            Exception: that of the first failed task, after all tasks have ended.
        """
        running = [worker.submit(task) for worker, task in zip(self._workers, tasks, strict=False)]
        wait(running)
        return [future.result() for future in running]

    def close(self) -> None:
        """Stop the threads."""
        for worker in self._workers:
            worker.shutdown()


def _use_one_core() -> None:
    # torch applies its default when a thread first asks, even over the thread's own setting: so ask, then set
    torch.get_num_threads()
    torch.set_num_threads(1)


def _nothing() -> None:
    pass
