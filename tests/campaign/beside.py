"""Threads that disturb a server while requests come, and report what fails there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from .endings import Ledger

_PATIENCE_SECONDS = 180.0


@contextmanager
def beside(
    what: str,
    work: Callable[[Event], object],
    ledger: Ledger,
    *,
    patience: float = _PATIENCE_SECONDS,
) -> Iterator[None]:
    """Run `work` in a thread while a `with` block runs, and wait for its end.

    Args:
        what: names the work in a problem.
        work: gets an event that is set when the block is over.
        ledger: gets the failure of the work, and that it does not end.
        patience: seconds after the block that the work may take.
    """
    is_over = Event()

    def run() -> None:
        try:
            work(is_over)
        except Exception as error:
            ledger.report(f"{what} failed: {error!r}")

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(patience)
        if thread.is_alive():
            ledger.report(f"{what} did not end within {patience:g} s")
