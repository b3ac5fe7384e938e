"""Retries: which failures are retried, and the delay before each retry.

Inference changes no state of the server, so a request may be sent twice. Two failures are retried: the
server reports UNAVAILABLE (queue full, model not ready), or there is no connection (refused, or lost
before the response).

Three are not. After a timeout the first request may still be running, and a second one would double the
load of a slow server. A request that missed its deadline has no time left for another attempt. A model
whose process has ended takes no request until it is loaded again.

Before a retry, a request moves on to other replicas without a delay, if there are any (replicas.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from varlen_client.errors import ModelProcessEnded, ServerUnavailable

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of retries, and the delays between them, in seconds."""

    max_retries: int = 5
    first_delay: float = 0.1
    max_delay: float = 2.0

    def delay(self, retry: int) -> float:
        """Return the delay before retry 0, 1, …: doubled, capped, minus up to half."""
        longest = min(self.first_delay * 2.0**retry, self.max_delay)
        return longest * random.uniform(0.5, 1.0)


async def with_retries(
    send: Callable[[], Awaitable[_T]], policy: RetryPolicy, *, deadline: float | None
) -> _T:
    """Return the result of `send`, retried while the server is unavailable.

    Args:
        deadline: time on the event loop's clock; a retry that would start after it is not made.

    Raises:
        ServerUnavailable: the last attempt failed.
        ModelProcessEnded: an attempt found that the model's process has ended.
    """
    clock = asyncio.get_running_loop().time
    start, retry = clock(), 0
    while True:
        try:
            return await send()
        except ModelProcessEnded:
            raise
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
