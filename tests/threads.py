"""Threads that start together, and requests that arrive together, on a machine of any speed."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event

from varlen.in_process.generator import Generator


def run_in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run `work(index)` in threads that start together; raise any thread's error."""
    barrier = Barrier(count)

    def begin(index: int) -> None:
        barrier.wait()
        work(index)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))


@contextmanager
def arriving_together(generator: Generator) -> Iterator[None]:
    """Let no step begin until all requests of the block are there."""
    all_are_there = Event()
    executor = generator._service.engine._executor
    start = executor.start

    def start_later(*arguments: object) -> None:
        assert all_are_there.wait(60)
        start(*arguments)

    executor.start = start_later
    try:
        yield
    finally:
        del executor.start
        all_are_there.set()
