"""What may wait: caps on queued requests and tokens, and deadlines that can be kept, checked when a request comes.

The counters are the one thing that the threads which submit and the engine's thread share; a lock guards them.
"""

import math
from dataclasses import dataclass
from threading import Lock

from varlen.errors import DeadlineError, QueueFullError, RequestError
from varlen.request import Request


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request is expected to take, in seconds.

    Attributes:
        seconds: the shares of full batches that its sequences make up.
        batch_seconds: a full batch of sequences like its longest, which may have to run before it is answered.
    """

    seconds: float
    batch_seconds: float


class Admission:
    """Counts what waits, and refuses what would pass a cap or miss its deadline."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests = 0
        self._tokens = 0
        self._seconds = 0.0
        self._busy_until = -math.inf
        self._lock = Lock()

    @property
    def depth(self) -> tuple[int, int]:
        """(requests, tokens) that wait now."""
        with self._lock:
            return self._requests, self._tokens

    def enter(self, request: Request, forecast: Forecast, now: float) -> None:
        """Count a request in.

        Raises:
            RequestError: it is larger than the whole queue.
            QueueFullError: a cap would be passed.
            DeadlineError: its answer is not expected before its deadline. Nothing is counted, whichever it is.
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
            self._check_deadline(request.options.deadline_seconds, forecast, now)
            self._requests += 1
            self._tokens += tokens
            self._seconds += forecast.seconds

    def started(self, until: float) -> None:
        """Note that a batch runs, and when it is expected to end."""
        with self._lock:
            self._busy_until = until

    def leave(self, *, requests: int, tokens: int, seconds: float) -> None:
        """Count out what starts to run or is dropped. A request leaves with its last sequence."""
        with self._lock:
            self._requests -= requests
            self._tokens -= tokens
            # sums of floats do not come back to nothing by themselves
            self._seconds = max(0.0, self._seconds - seconds) if self._requests else 0.0

    def _check_deadline(self, allowed: float | None, forecast: Forecast, now: float) -> None:
        if allowed is None:
            return
        wait = max(0.0, self._busy_until - now) + self._seconds
        # its batch is filled up with what comes meanwhile
        expected = wait + forecast.seconds + min(wait, forecast.batch_seconds)
        if expected > allowed:
            raise DeadlineError(
                f"the answer would come in about {1000 * expected:.0f} ms, and is wanted within {1000 * allowed:.0f} ms"
            )
