"""Fakes for engine tests: a recording reply, and a clock and executor driven by hand."""

import math
from collections import deque
from threading import Event


class Clock:
    """A clock that a test advances."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


class FakeReply:
    """Records an answer; fails if the engine breaks the contract of `Reply`.

    Args:
        cancelled: results of `is_cancelled`, call by call; False after that.
        cancelled_after: number of parts after which the client disconnects.
        raises: names of methods that raise. `finish` raises before the answer counts, the others after it.
    """

    def __init__(self, cancelled=(), *, cancelled_after=math.inf, raises=()):
        self.outputs = {}
        self.answers = []
        self.answered = Event()
        self.asked = 0
        self.cancelled = False
        self._cancelled = deque(cancelled)
        self._cancelled_after = cancelled_after
        self._raises = raises

    def is_cancelled(self):
        assert not self.answers, "asked after the answer"
        self.asked += 1
        self._raise_in("is_cancelled")
        if self._cancelled:
            return self._cancelled.popleft()
        return self.cancelled or sum(map(len, self.outputs.values())) >= self._cancelled_after

    def send(self, row, output):
        assert not self.answers, "a part after the answer"
        self.outputs.setdefault(row, []).append(output)
        self._raise_in("send")

    def finish(self):
        self._raise_in("finish")
        self._end("finished")

    def fail(self, error):
        self._end(error)
        self._raise_in("fail")

    def _end(self, answer):
        self.answers.append(answer)
        self.answered.set()

    def _raise_in(self, method):
        if method in self._raises:
            raise OSError(method)

    @property
    def parts(self):
        """The values of all parts, by row."""
        return {row: [part.tolist() for part in parts] for row, parts in self.outputs.items()}

    @property
    def end(self):
        """How the answer ended: "finished", an error, or None while it has not."""
        assert len(self.answers) <= 1, self.answers
        return self.answers[0] if self.answers else None

    @property
    def only(self):
        """The answer: the values of each row, which came in one part, or the error."""
        assert self.answers, "no answer"
        if self.end != "finished":
            return self.end
        rows = [self.parts[row] for row in range(len(self.parts))]
        assert all(len(parts) == 1 for parts in rows), "a row in two parts"
        return [parts[0] for parts in rows]


class HeldExecutor:
    """Holds each batch until a test completes it.

    A subclass computes the result, when the batch starts.
    """

    def __init__(self, slots=1):
        self.slots = slots
        self.in_flight = []

    def result_of(self, batch):
        raise NotImplementedError

    def start(self, batch, completed):
        assert len(self.in_flight) < self.slots
        self.in_flight.append((batch, completed, self.result_of(batch)))

    def free_at(self):
        return -math.inf

    def collect(self, timeout):
        return False

    def complete(self, index=0):
        batch, completed, result = self.in_flight.pop(index)
        completed(batch, result)
