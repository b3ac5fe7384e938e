"""The replicas of a server: which one gets a request, and the watch over it.

A request goes to the replica with the fewest requests of this client in flight. If it is refused there, or its
connection is lost, it moves on to another one at once, and a replica that failed is avoided for a while. Inference
changes no state of the server, so this is safe until a part of an answer has come.

A budget bounds these moves, as in Finagle ("RetryBudget") and Envoy ("retry budget"): without it a dead or full replica
would double the load of the others. A request that may not move on waits as `RetryPolicy` says.

A server whose model process was killed answers none of the requests that the process held, and reports the model as
ready. It refuses new requests though, one in a second. So while calls wait and none is answered, a small request is
sent. Calls fail only after several refusals in a row, since the server also refuses a request while the process is
paused. Any other answer, even none, says nothing (decision 0048).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from varlen_client.errors import (
    ModelProcessEnded,
    ModelUnloaded,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.generation import OperationRequest
from varlen_client.transport.endpoint import Discovery, Endpoint
from varlen_client.transport.transport import Transport
from varlen_client.waits import cancel_all, with_timeout
from varlen_client.wire import InferRequest, ModelInfo, Rows

# Refusals in a row after which the process has ended, and seconds between two small requests.
_REFUSALS = 3
_PAUSE_SECONDS = 0.2
# The server refuses requests of other clients first.
_PROBE_SECONDS = 30.0
# Moves per request that was sent, and those that are always allowed, counted over about these seconds.
BUDGET_SHARE = 0.1
BUDGET_FLOOR = 3.0
BUDGET_SECONDS = 10.0
# A replica that failed is avoided for this time, doubled with each failure in a row.
FIRST_AVOIDANCE_SECONDS = 0.5
LONGEST_AVOIDANCE_SECONDS = 30.0

METADATA_TIMEOUT_SECONDS = 10.0

_MOVES_ON = (ServerUnavailable, ModelUnloaded)

_T = TypeVar("_T")
# Asks a server about itself or its models.
Query: TypeAlias = Callable[[Transport], Coroutine[object, object, _T]]


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


def _is_cancelled_otherwise(task: asyncio.Task[object]) -> bool:
    """Undo the cancellation by the watch, and return whether the task was cancelled otherwise too."""
    # Python 3.10 does not count them
    return sys.version_info >= (3, 11) and task.uncancel() > 0


class RetryBudget:
    """Allows moves for a share of the recent requests, and a few more.

    Both counts fade with the time constant `BUDGET_SECONDS`, so they need no list of times.
    """

    def __init__(self) -> None:
        self._requests = 0.0
        self._moves = 0.0
        self._faded_at = -math.inf

    def count_request(self, now: float) -> None:
        """Count a request, whose replica is its first one."""
        self._fade(now)
        self._requests += 1.0

    def spend(self, now: float) -> bool:
        """Return whether a request may move on, and count its move."""
        self._fade(now)
        if self._moves >= BUDGET_FLOOR + BUDGET_SHARE * self._requests:
            return False
        self._moves += 1.0
        return True

    def _fade(self, now: float) -> None:
        left = math.exp((self._faded_at - now) / BUDGET_SECONDS)
        self._requests *= left
        self._moves *= left
        self._faded_at = now


class Replica:
    """The connections to one server, and what this client knows of it."""

    def __init__(self, endpoint: Endpoint, ca_file: Path | None, watch_seconds: float) -> None:
        self.endpoint = endpoint
        self.in_flight = 0
        self._queries = 0
        self._ca_file = ca_file
        self._watch = ModelWatch(self._probe, watch_seconds)
        self._transport: Transport | None = None
        # all connections of a pool may be held by requests that are not answered
        self._probe_transport: Transport | None = None
        self._watched: ModelInfo | None = None
        self._failures = 0
        self._avoided_until = -math.inf

    @property
    def transport(self) -> Transport:
        """The transport of requests, which the first use connects."""
        if self._transport is None:
            self._transport = _connect(self.endpoint, self._ca_file)
        return self._transport

    def is_avoided(self, now: float) -> bool:
        """Return whether the replica failed lately, or one request is trying it again."""
        return now < self._avoided_until or (self._failures > 0 and self.in_flight > 0)

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """Count a request in flight, and avoid the replica if it fails."""
        self.in_flight += 1
        try:
            yield
        except _MOVES_ON:
            self._avoid(_now())
            raise
        else:
            self._failures = 0
            self._avoided_until = -math.inf
        finally:
            self.in_flight -= 1

    async def answer(self, query: Query[_T]) -> _T:
        """Return the result of a metadata query, which a working server answers at once."""
        self._queries += 1
        try:
            return await with_timeout(query(self.transport), METADATA_TIMEOUT_SECONDS)
        except TimeoutError:
            raise RequestTimeout(
                f"{self.endpoint.label} did not answer within {METADATA_TIMEOUT_SECONDS:g} s"
            ) from None
        finally:
            self._queries -= 1

    @property
    def is_idle(self) -> bool:
        """Whether no request and no query is in flight."""
        return not self.in_flight and not self._queries

    def watching(self, info: ModelInfo) -> AbstractContextManager[None]:
        """Return a context for a wait for the model."""
        if not info.can_be_watched:
            return nullcontext()
        self._watched = info
        return self._watch.waiting()

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        await self._watch.close()
        transports = self._transport, self._probe_transport
        self._transport = self._probe_transport = None
        for transport in transports:
            if transport is not None:
                await transport.close()

    def _avoid(self, now: float) -> None:
        # requests that were in flight together fail together, and count once
        if now < self._avoided_until:
            return
        # the exponent is bounded, since a replica may stay dead for days
        seconds = FIRST_AVOIDANCE_SECONDS * 2.0 ** min(self._failures, 16)
        self._failures += 1
        self._avoided_until = now + min(seconds, LONGEST_AVOIDANCE_SECONDS)

    async def _probe(self) -> None:
        """Send a small request to the model for which calls wait."""
        assert self._watched is not None
        if self._probe_transport is None:
            self._probe_transport = _connect(self.endpoint, self._ca_file)
        info, transport = self._watched, self._probe_transport
        if info.generates:
            async with aclosing(transport.generate(info.name, probe_prompt(info))) as responses:
                async for _ in responses:
                    pass
        else:
            await transport.infer(info.name, probe_rows(info))


class Replicas:
    """The replicas of a server; with one, requests never move on."""

    def __init__(self, discovery: Discovery, new_replica: Callable[[Endpoint], Replica]) -> None:
        self._discovery = discovery
        self._new_replica = new_replica
        self._endpoints: tuple[Endpoint, ...] = ()
        self._replicas: tuple[Replica, ...] = ()
        # replicas whose address has vanished, until their requests have ended
        self._retired: list[Replica] = []
        self._budget = RetryBudget()
        self._closings = 0
        self._turns = itertools.count()

    def sender(
        self, attempt: Callable[[Replica], Awaitable[_T]]
    ) -> Callable[[], Coroutine[object, object, _T]]:
        """Return a function that sends one request, as often as it is called before `close`."""
        closings = self._closings

        async def send() -> _T:
            # a connection that is made now would never be closed
            if self._closings != closings:
                raise ServerError("the client was closed")
            return await self.send(attempt)

        return send

    async def send(self, attempt: Callable[[Replica], Awaitable[_T]]) -> _T:
        """Return the result of an attempt at the first replica that takes the request.

        Raises:
            ServerUnavailable: every replica failed, or the budget does not allow another one.
            ModelProcessEnded, ModelUnloaded: every replica failed, all of them in this way.
        """
        await self._update()
        self._budget.count_request(_now())
        failures: dict[Replica, VarlenClientError] = {}
        while True:
            replica = self._by_load(failures)[0]
            try:
                with replica.requesting():
                    return await attempt(replica)
            except _MOVES_ON as error:
                self._discovery.hurry()
                if self._replicas == (replica,):
                    raise
                failures[replica] = error
            if not self._by_load(failures):
                raise _failure_of_all(list(failures.values()))
            if not self._budget.spend(_now()):
                tried = f"tried {len(failures)} of {len(self._replicas)} replicas"
                raise ServerUnavailable(
                    f"{failures[replica]} ({tried}; the retry budget is spent)"
                ) from failures[replica]

    async def ask(self, query: Query[_T]) -> _T:
        """Return the result of a metadata query at the first replica that answers."""
        await self._update()
        *others, last = self._by_load()
        for replica in others:
            try:
                return await replica.answer(query)
            except (*_MOVES_ON, RequestTimeout):
                self._discovery.hurry()
        return await last.answer(query)

    async def any_of(self, question: Query[bool]) -> bool:
        """Return whether one replica says yes; those after it are not asked."""
        await self._update()
        for replica in self._by_load():
            with suppress(ServerUnavailable, RequestTimeout):
                if await replica.answer(question):
                    return True
        return False

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        self._closings += 1
        await self._discovery.close()
        for replica in (*self._replicas, *self._retired):
            await replica.close()
        self._retired.clear()

    async def _update(self) -> None:
        """Follow the addresses that are known, and close replicas that are no longer used."""
        endpoints = await self._discovery.endpoints()
        if endpoints is not self._endpoints:
            known = {replica.endpoint: replica for replica in (*self._replicas, *self._retired)}
            self._endpoints = endpoints
            self._replicas = tuple(
                known.pop(each) if each in known else self._new_replica(each) for each in endpoints
            )
            self._retired = list(known.values())
        for replica in [each for each in self._retired if each.is_idle]:
            self._retired.remove(replica)
            await replica.close()

    def _by_load(self, tried: Collection[Replica] = ()) -> list[Replica]:
        """Return the replicas that were not tried, the best one first."""
        now, turn = _now(), next(self._turns) % len(self._replicas)
        # the order of equals rotates
        rotated = self._replicas[turn:] + self._replicas[:turn]
        left = [replica for replica in rotated if replica not in tried]
        return sorted(left, key=lambda replica: (replica.is_avoided(now), replica.in_flight))


def _failure_of_all(errors: list[VarlenClientError]) -> VarlenClientError:
    """Return the error of a request that every replica refused."""
    # the kind that may pass soonest comes first
    kinds = [ServerUnavailable, ModelProcessEnded, ModelUnloaded]
    error = min(errors, key=lambda error: kinds.index(type(error)))
    failure = type(error)(f"{error} (tried {len(errors)} of {len(errors)} replicas)")
    failure.__cause__ = error
    return failure


def _connect(endpoint: Endpoint, ca_file: Path | None) -> Transport:
    """Return a transport for the event loop that runs now."""
    # Imported here: each protocol takes a few hundred milliseconds to import, and a process rarely
    # needs both.
    if endpoint.protocol == "grpc":
        from varlen_client.transport.grpc import GrpcTransport

        return GrpcTransport(endpoint, ca_file)
    from varlen_client.transport.http import HttpTransport

    return HttpTransport(endpoint, ca_file)


def _now() -> float:
    return asyncio.get_running_loop().time()


_PARAMETERS = {"operation": "tokenize"}
_TEXT = "a"
_TOKEN_ID = 0


def probe_prompt(info: ModelInfo) -> OperationRequest:
    """Return the small request for a model that generates: it tokenizes a letter.

    No batch and no queue of the model delays it, and short texts pass long ones before the tokenizer. A model without a
    tokenizer, or one that holds its most requests, refuses it at once. The server passes on only inputs that the model
    has.
    """
    has_text = "text_input" in info.inputs
    prompt: Any = ("text_input", _TEXT) if has_text else ("input_ids", [_TOKEN_ID])
    return OperationRequest(prompt, _PARAMETERS, stream=False)


def probe_rows(info: ModelInfo) -> InferRequest:
    """Return the small request for a model of any other task."""
    text = (_TEXT.encode(), b"") if info.requires_pairs else (_TEXT.encode(),)
    ids = np.full(1, _TOKEN_ID, dtype=np.int64)
    rows = Rows(texts=(text,)) if "text" in info.inputs else Rows(ids=(ids,))
    row = range(1)
    return InferRequest(row, rows.tensors(row), (next(iter(info.outputs)),), _PARAMETERS)
