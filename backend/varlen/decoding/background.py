"""Calls that may block, in a thread of their own."""

import logging
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread

_log = logging.getLogger(__name__)


class Background:
    """Runs calls one after another in a thread, which lives while there are any. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Start without a thread.

        Args:
            name: name of the thread in tools that list them.
        """
        self._name = name
        self._lock = Lock()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_running = False

    def run(self, call: Callable[[], object]) -> None:
        """Run a call later, after those that came before."""
        with self._lock:
            self._calls.append(call)
            if self._is_running:
                return
            self._is_running = True
        try:
            Thread(target=self._loop, name=self._name, daemon=True).start()
        except RuntimeError:
            _log.exception("no thread can be started; the next call tries again")
            self._is_running = False

    def _loop(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                _log.exception("a call in the background failed")

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._calls:
                return self._calls.popleft()
            self._is_running = False
            return None
