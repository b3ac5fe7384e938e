"""How much may wait: caps on queued requests and tokens, checked the moment a request comes.

The counters are the one thing that the threads which submit and the engine's thread share; a lock guards them.
"""

from threading import Lock

from varlen.errors import QueueFullError, RequestError
from varlen.request import Request


class Admission:
    """Counts what waits and refuses what would pass a cap."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests = 0
        self._tokens = 0
        self._lock = Lock()

    @property
    def depth(self) -> tuple[int, int]:
        """(requests, tokens) that wait now."""
        with self._lock:
            return self._requests, self._tokens

    def enter(self, request: Request) -> None:
        """Count a request in.

        Raises:
            RequestError: it is larger than the whole queue.
            QueueFullError: a cap would be passed; nothing is counted.
        """
        tokens = request.num_tokens
        if tokens > self._max_tokens:
            raise RequestError(
                f"the request has {tokens} tokens; this model queues at most {self._max_tokens}:"
                " send fewer rows at once"
            )
        with self._lock:
            if self._requests >= self._max_requests:
                raise QueueFullError(
                    f"the queue is full: {self._requests} requests wait and {self._max_requests} may;"
                    " try again later"
                )
            if self._tokens + tokens > self._max_tokens:
                raise QueueFullError(
                    f"the queue is full: {self._tokens} tokens wait, {tokens} came and {self._max_tokens} may wait;"
                    " try again later"
                )
            self._requests += 1
            self._tokens += tokens

    def leave(self, *, requests: int, tokens: int) -> None:
        """Count out what starts to run or is dropped. A request leaves with its last sequence."""
        with self._lock:
            self._requests -= requests
            self._tokens -= tokens
