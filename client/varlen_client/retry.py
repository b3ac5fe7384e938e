"""When a request is sent again, and how long the client waits before.

Inference changes nothing at the server, so a request may be sent twice. Two cases are worth it: the
server said UNAVAILABLE (queue full, model not ready), or there is no connection (refused, or lost
before the answer). After a timeout nothing is retried: the first request may still be running, and
a second one would double the load of a slow server. Nor is a deadline that the server will miss: it
refuses those that it has no time for, and to ask again takes from the time of the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from varlen_client.errors import ServerUnavailable

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to send again, with exponential back-off. Delays in seconds."""

    max_retries: int = 5
    first_delay: float = 0.1
    max_delay: float = 2.0

    def delay(self, retry: int) -> float:
        """Return the wait before retry 0, 1, …: doubled, capped, then cut by up to half."""
        longest = min(self.first_delay * 2.0**retry, self.max_delay)
        return longest * random.uniform(0.5, 1.0)


async def with_retries(
    send: Callable[[], Awaitable[_T]], policy: RetryPolicy, *, deadline: float | None
) -> _T:
    """Return what `send` returns, sending again while the server is unavailable.

    Args:
        deadline: on the clock of the event loop; a wait that would pass it is not begun.

    Raises:
        ServerUnavailable: the last one, after the last try.
    """
    clock = asyncio.get_running_loop().time
    start, retry = clock(), 0
    while True:
        try:
            return await send()
        except ServerUnavailable as error:
            delay = policy.delay(retry)
            is_late = deadline is not None and clock() + delay >= deadline
            if retry >= policy.max_retries or is_late:
                if retry == 0:
                    raise
                tried = f" (tried {retry + 1} times in {clock() - start:.1f} s)"
                raise ServerUnavailable(f"{error}{tried}") from error
            await asyncio.sleep(delay)
            retry += 1
