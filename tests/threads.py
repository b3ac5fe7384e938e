"""Running a function in many threads; an error in any thread fails the test."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def run_in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run `work(index)` in threads that start together; raise any thread's error."""
    barrier = Barrier(count)

    def begin(index: int) -> None:
        barrier.wait()
        work(index)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))
