"""Admission and fair order: what may wait, and what comes first.

Admission counts waiting work, and refuses requests that exceed a limit. Threads that submit requests and the engine's
thread share its counters; a lock guards them.

Fair order: equal shares of the server for tenants, and for the requests of each.

A request of size `own` finds `waiting` requests of its tenant, and work of others:

    before  = min(waiting * own / weight, patience * waiting work of the tenant)
    between = min(other tenants * (before + own) / weight, patience * waiting work of the others)
    rank    = served work + before + between + own

Work is counted in sequences, or in tokens. Requests of one size, one weight and one tenant are served first come, first
served. A larger request lets smaller ones pass, until all that it found and as much of others as its own size has been
served; with a patience above 1, that many times as long. docs/decisions/0044-fair-generation.md has the reasons.

Source: the order in which processor sharing would finish (Friedman and Henderson 2003, "Fairness and efficiency in
web server protocols"), with the number of competitors taken at arrival. Served tokens of a tenant as its use of the
server: Sheng et al. 2024, "Fairness in serving large language models" (OSDI).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from varlen.errors import DeadlineError, QueueFullError, RequestError
from varlen.request.generation import GenerationOptions
from varlen.request.request import MAX_PROBE_TOKENS, Prompt, Request, reserve
from varlen.scheduling.batch import Batch, Forecast, GeneratedSequence

# Ranks are whole numbers of this part of a unit of work, since sums of floats depend on what was served before. All
# weights up to 10 divide it.
RANK_UNIT = 2520


class Work(NamedTuple):
    """Work that waits no longer.

    Attributes:
        requests: number of requests that have no waiting sequence left.
        tokens, seconds: tokens and expected seconds of the sequences that leave.
    """

    requests: int
    tokens: int
    seconds: float


_NO_WORK = Work(0, 0, 0.0)


class Admission:
    """Counts waiting work, and refuses requests beyond a limit or too late."""

    def __init__(self, max_requests: int, max_tokens: int, *, slots: int = 1) -> None:
        """Start with an empty queue.

        Args:
            max_requests, max_tokens: limits of waiting work.
        """
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.slots = slots
        self._requests = 0
        self._tokens = 0
        self._seconds = 0.0
        # expected end of each batch in flight
        self._ends: dict[Batch, float] = {}
        self._lock = Lock()

    @property
    def depth(self) -> tuple[int, int]:
        with self._lock:
            return self._requests, self._tokens

    @property
    def queued_seconds(self) -> float:
        """Predicted seconds until what waits now has run, if nothing else comes."""
        with self._lock:
            return self._seconds / self.slots

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._ends

    def enter(self, request: Request, forecast: Forecast, now: float) -> None:
        """Count a request that begins to wait.

        Raises:
            RequestError: it is larger than the whole queue.
            QueueFullError: a cap would be passed.
            DeadlineError: its answer is not expected before its deadline. In all three cases nothing is counted.
        """
        tokens = request.num_tokens
        if tokens > self._max_tokens:
            raise RequestError(
                f"the request has {tokens} tokens; this model queues at most {self._max_tokens}:"
                " send fewer rows at once"
            )
        options = request.options
        with self._lock:
            if self._requests >= self._max_requests + reserve(options, 1):
                raise QueueFullError(
                    f"the queue is full: {self._requests} requests wait, at most {self._max_requests} may;"
                    " try again later"
                )
            if self._tokens + tokens > self._max_tokens + reserve(options, MAX_PROBE_TOKENS):
                raise QueueFullError(
                    f"the queue is full: {self._tokens} tokens wait, the request has {tokens},"
                    f" at most {self._max_tokens} may wait; try again later"
                )
            self._check_deadline(request.deadline(now) - now, forecast, now)
            self._requests += 1
            self._tokens += tokens
            self._seconds += forecast.seconds

    def leave(self, left: Work) -> None:
        with self._lock:
            self._subtract(left)

    def mark_running(self, batch: Batch, until: float, left: Work = _NO_WORK) -> None:
        """Count a batch that is expected to run until then; subtract what waits no longer."""
        with self._lock:
            self._ends[batch] = until
            self._subtract(left)

    def mark_ended(self, batch: Batch) -> None:
        with self._lock:
            self._ends.pop(batch, None)

    def _subtract(self, left: Work) -> None:
        self._requests -= left.requests
        self._tokens -= left.tokens
        self._seconds -= left.seconds
        # sums of floats do not return to zero by themselves
        self._seconds = max(0.0, self._seconds) if self._requests else 0.0

    def _wait_seconds(self, now: float, part_before: float = 1.0) -> float:
        in_flight = sum(max(0.0, end - now) for end in self._ends.values())
        return (in_flight + part_before * self._seconds) / self.slots

    def _check_deadline(self, allowed: float, forecast: Forecast, now: float) -> None:
        if allowed == math.inf:
            return
        wait = self._wait_seconds(now, forecast.part_before)
        # later requests may fill up its batch
        alone = max(forecast.seconds + min(wait, forecast.batch_seconds), forecast.least_seconds)
        expected = wait + alone
        if expected > allowed:
            raise DeadlineError(
                f"the answer is expected in about {1000 * expected:.0f} ms, the deadline is in"
                f" {1000 * max(0.0, allowed):.0f} ms"
            )


@dataclass(slots=True)
class _Backlog:
    """Requests of a tenant that are not served yet, and their work."""

    requests: int = 0
    work: int = 0


_NO_BACKLOG = _Backlog()


class FairShare:
    """The work of all tenants that waits, and that was served.

    Args:
        patience: factor of the work that waits and may pass a large request.
    """

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience
        self._served = self._waiting = 0
        # of tenants with requests
        self._backlogs: dict[str, _Backlog] = {}

    def enter(self, tenant: str, own: int, weight: int = 1) -> int:
        """Count a request that begins to wait, and return its rank, in `RANK_UNIT`.

        The lowest rank is served first.

        Args:
            weight: factor by which the competitors count less.
        """
        rank = RANK_UNIT * (self._served + own) + self._before(tenant, own, weight)
        mine = self._backlogs.setdefault(tenant, _Backlog())
        mine.requests += 1
        mine.work += own
        self._waiting += own
        return rank

    def part_before(self, tenant: str, own: int, weight: int = 1) -> float:
        """Return the part of the waiting work that is served before a request.

        It is at most 1. Any thread may call it.
        """
        waiting = RANK_UNIT * self._waiting
        return min(1.0, self._before(tenant, own, weight) / waiting) if waiting else 1.0

    def _before(self, tenant: str, own: int, weight: int) -> int:
        """Return the work that is served before a request, in `RANK_UNIT`."""
        mine = self._backlogs.get(tenant, _NO_BACKLOG)
        others = len(self._backlogs) - (mine is not _NO_BACKLOG)
        own_rank, patience = RANK_UNIT * own, RANK_UNIT * self._patience
        before = min(mine.requests * own_rank // weight, patience * mine.work)
        return before + min(
            others * (before + own_rank) // weight, patience * (self._waiting - mine.work)
        )

    def serve(self, tenant: str, work: int, *, repeated: int = 0) -> None:
        """Count work that waits no longer: it is served, or is needed no more.

        Args:
            repeated: more work, which was lost and is served once more.
        """
        self._backlogs[tenant].work -= work
        self._waiting -= work
        self._served += work + repeated

    def leave(self, tenant: str) -> None:
        mine = self._backlogs[tenant]
        mine.requests -= 1
        if not mine.requests:
            del self._backlogs[tenant]


# See decision 0044.
_PATIENCE = 2


@dataclass(slots=True, eq=False)
class Claim:
    """Tokens that a part of a request may still run, owed to its tenant.

    The part is what starts as one group.

    Attributes:
        unserved: tokens that may still run, if its answers have `max_tokens`.
        groups: groups that it consists of now.
    """

    tenant: str
    unserved: int
    groups: int = 1


class Claims:
    """Open claims of all tenants.

    The waiting work of a tenant in `FairShare` is the sum of the unserved tokens of its claims.
    """

    def __init__(self) -> None:
        self._share = FairShare(_PATIENCE)

    def enter(self, first: GeneratedSequence) -> tuple[int, Claim]:
        """Return the rank and the claim of a group that begins to wait."""
        options, tokens = first.options, _work(first.prompt, first.generation)
        rank = self._share.enter(options.tenant, tokens, 1 + options.priority)
        return rank, Claim(options.tenant, tokens)

    def part_before(self, request: Request) -> float:
        """Return the part of waiting work that runs before a new request. From any thread."""
        options = request.options
        assert options.generation is not None
        work = max(_work(prompt, options.generation) for prompt in request.prompts)
        return self._share.part_before(options.tenant, work, 1 + options.priority)

    def serve(self, served: Iterable[tuple[Claim, int]]) -> None:
        """Count tokens of claims that have run.

        Tokens beyond a claim were lost and ran again.
        """
        work: Counter[str] = Counter()
        repeated: Counter[str] = Counter()
        for claim, tokens in served:
            left = claim.unserved - tokens
            work[claim.tenant] += tokens
            if left < 0:
                work[claim.tenant] += left
                repeated[claim.tenant] -= left
                left = 0
            claim.unserved = left
        for tenant, tokens in work.items():
            self._share.serve(tenant, tokens, repeated=repeated[tenant])

    def leave(self, claim: Claim) -> None:
        """Count one group less; the claim ends with its last one."""
        claim.groups -= 1
        if not claim.groups:
            self._share.serve(claim.tenant, claim.unserved)
            self._share.leave(claim.tenant)


def _work(prompt: Prompt, options: GenerationOptions) -> int:
    """Return the most tokens that a prompt and its answers run."""
    return prompt.num_tokens + max(options.n, options.num_beams) * options.max_tokens
