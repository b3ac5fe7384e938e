"""The watch over waiting calls, which fail once their model's process has ended.

A server whose model process was killed answers none of the requests that the process held, and reports the model as
ready. It refuses new requests though, one in a second. So while calls wait and none is answered, a small request is
sent. Calls fail only after several refusals in a row, since the server also refuses a request while the process is
paused. Any other answer, even none, says nothing (decision 0048).
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from varlen_client.errors import ModelProcessEnded, VarlenClientError
from varlen_client.waits import cancel_all, with_timeout

# Refusals in a row after which the process has ended, and seconds between two small requests.
_REFUSALS = 3
_PAUSE_SECONDS = 0.2
# The server refuses requests of other clients first.
_PROBE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class _Wait:
    """A call that waits.

    Attributes:
        task: task of the call, which the watch cancels when the process has ended.
        since: start of the wait, on the event loop's clock.
        failure: reason why the watch cancelled the task; None if it did not.
    """

    task: asyncio.Task[object]
    since: float
    failure: str | None = None


class ModelWatch:
    """Watches the process of one model while calls wait for it, on one event loop.

    Args:
        probe: sends a small request to the model, and waits for the end of its answer.
        seconds: seconds without an answer to any call after which a small request is sent; 0 sends none.
    """

    def __init__(
        self, probe: Callable[[], Coroutine[object, object, None]], seconds: float
    ) -> None:
        self._probe = probe
        self._seconds = seconds
        # the oldest first
        self._waits: dict[_Wait, None] = {}
        self._answered_at = -math.inf
        # times of the refusals since the last answer
        self._refusals: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch the task that runs inside the context, which waits for the model.

        Raises:
            ModelProcessEnded: the model's process has ended; the wait was cancelled.
        """
        task = asyncio.current_task()
        if not self._seconds or task is None:
            yield
            return
        wait = _Wait(task, _now())
        self._waits[wait] = None
        if self._timer is None and self._asking is None:
            self._wake_at(wait.since + self._seconds)
        try:
            yield
        except asyncio.CancelledError:
            if wait.failure is None or _is_cancelled_otherwise(task):
                raise
            raise ModelProcessEnded(wait.failure) from None
        except ModelProcessEnded as error:
            del self._waits[wait]
            self._count_refusal(error)
            raise
        else:
            self._count_answer()
        finally:
            self._waits.pop(wait, None)

    async def close(self) -> None:
        """Stop the watch; calls in progress are watched no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._asking is not None:
            await cancel_all([self._asking])

    def _wake_at(self, time: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(time, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if not self._waits or self._asking is not None:
            return
        due = max(next(iter(self._waits)).since, self._answered_at) + self._seconds
        if _now() < due:
            self._wake_at(due)
        else:
            self._start_asking()

    def _start_asking(self) -> None:
        if self._asking is None and self._waits:
            self._asking = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        """Send small requests until one is not refused, or the calls have failed."""
        try:
            while await self._is_refused():
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._asking = None
        if self._waits and self._timer is None:
            self._wake_at(_now() + self._seconds)

    async def _is_refused(self) -> bool:
        """Send a small request; return whether it was refused, and more are needed."""
        try:
            await with_timeout(self._probe(), _PROBE_SECONDS)
        except ModelProcessEnded as error:
            return not self._count_refusal(error)
        except (VarlenClientError, TimeoutError):
            self._refusals.clear()
        else:
            self._count_answer()
        return False

    def _count_answer(self) -> None:
        self._answered_at = _now()
        self._refusals.clear()

    def _count_refusal(self, error: ModelProcessEnded) -> bool:
        """Return whether the refusals in a row are enough; then fail the calls before them."""
        self._refusals.append(_now())
        if len(self._refusals) < _REFUSALS:
            self._start_asking()
            return False
        for wait in self._waits:
            if wait.since <= self._refusals[0] and wait.failure is None:
                wait.failure = f"no answer will come, since {error}"
                wait.task.cancel()
        self._refusals.clear()
        return True


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_cancelled_otherwise(task: asyncio.Task[object]) -> bool:
    """Undo the cancellation by the watch, and return whether the task was cancelled otherwise too."""
    # Python 3.10 does not count them
    return sys.version_info >= (3, 11) and task.uncancel() > 0
