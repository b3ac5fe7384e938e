"""Time that passes only in sleeps: in an event loop, or in the module time."""

import asyncio
import selectors
import time


class _JumpingSelector(selectors.SelectSelector):
    """Waits by moving a clock."""

    now = 0.0

    def select(self, timeout=None):
        # a loop without anything to wait for has ended up in a deadlock
        assert timeout is not None
        self.now += timeout
        return super().select(0)


def on_virtual_clock(coroutine):
    """Return a coroutine's result, run on a loop whose time passes only where it sleeps."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


class VirtualTime:
    """The time of time.perf_counter and time.sleep, in seconds."""

    now = 0.0

    @classmethod
    def replace(cls, monkeypatch):
        """Have the module time use a clock that only sleeps move, until a test ends."""
        clock = cls()
        monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
        monkeypatch.setattr(time, "sleep", clock.sleep)

    def sleep(self, seconds):
        self.now += seconds
