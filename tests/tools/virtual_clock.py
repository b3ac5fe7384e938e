"""An event loop whose time passes only while nothing else is to be done."""

import asyncio
import selectors


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
