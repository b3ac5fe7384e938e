"""A session with one model of a server or its replicas, and its retries.

Inference changes no state of the server, so a request may be sent twice. Two failures are retried: the server reports
UNAVAILABLE (queue full, model not ready), or there is no connection (refused, or lost before the response). Before a
retry, a request moves on to other replicas without a delay, if there are any (replicas.py).

Three are not. After a timeout the first request may still be running, and a second one would double the load of a slow
server. A request that missed its deadline has no time left for another attempt. A model whose process has ended takes
no request until it is loaded again. Timeouts and rows are above the session.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from varlen_client.errors import (
    ModelProcessEnded,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.generation import GenerateRequest, Response
from varlen_client.transport.endpoint import Discovery, Endpoint
from varlen_client.transport.replicas import METADATA_TIMEOUT_SECONDS, Replica, Replicas
from varlen_client.transport.transport import ServerIdentity, Transport
from varlen_client.waits import all_or_first_error, with_timeout
from varlen_client.wire import (
    Arrays,
    InferRequest,
    ModelInfo,
    ModelState,
    only_ready_model,
    with_remaining_deadline,
)

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


# A model may be loaded again with other sizes.
_INFO_SECONDS = 30.0
# Configs that are read at a time, of one server.
_INFOS_TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Status:
    """State of the server and its models, as the server reports it."""

    server: ServerIdentity
    server_ready: bool
    models: tuple[ModelState, ...]
    model: str | None
    """The model that this client uses; None when none was chosen, and none or several are ready."""
    model_ready: bool


class Session:
    """The connections to a server or its replicas, for one model and one event loop.

    Args:
        model: the model's name; None for the only ready model of the server.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        model: str | None,
        retry: RetryPolicy,
        ca_file: Path | None,
        tenant: str | None = None,
        *,
        watch_seconds: float,
    ) -> None:
        self._replicas = Replicas(
            Discovery(endpoints), lambda endpoint: Replica(endpoint, ca_file, watch_seconds)
        )
        self._model = model
        self._retry = retry
        self._common = {} if tenant is None else {"tenant": tenant}
        self._info: ModelInfo | None = None
        self._info_until = 0.0

    async def model_info(self, deadline: float | None) -> ModelInfo:
        """Return the model's info, which was read from the server within the last half minute.

        Args:
            deadline: time on the event loop's clock; no retry starts after it.
        """
        now = asyncio.get_running_loop().time()
        if self._info is None or now > self._info_until:
            self._info = await with_retries(self._query_info, self._retry, deadline=deadline)
            self._info_until = now + _INFO_SECONDS
            # the only ready model stays the one of this session
            self._model = self._info.name
        return self._info

    async def model_infos(self, names: Collection[str]) -> dict[str, ModelInfo]:
        """Return the infos of models by their names, read over this session's connections.

        A few are read at a time, without retries, for as long as one metadata query may take; models whose config
        cannot be read, or not until then, are left out.
        """
        limit = asyncio.Semaphore(_INFOS_TOGETHER)
        found: dict[str, ModelInfo] = {}

        async def read(name: str) -> None:
            async with limit:
                with suppress(VarlenClientError):
                    found[name] = await self._replicas.ask(partial(_config_of, name))

        tasks = [asyncio.ensure_future(read(name)) for name in names]
        if tasks:
            with suppress(TimeoutError):
                await with_timeout(all_or_first_error(tasks), METADATA_TIMEOUT_SECONDS)
        return found

    async def infer(self, info: ModelInfo, request: InferRequest, deadline: float | None) -> Arrays:
        """Return the requested outputs."""
        clock = asyncio.get_running_loop().time
        start = clock()

        async def attempt(replica: Replica) -> Arrays:
            parameters = with_remaining_deadline(request.parameters, clock() - start)
            parameters = {**self._common, **parameters}
            sent = InferRequest(request.rows, request.tensors, request.outputs, parameters)
            with replica.watching(info):
                return await replica.transport.infer(info.name, sent)

        latest = _earlier(deadline, start, request.parameters.get("deadline_ms"))
        return await with_retries(self._replicas.sender(attempt), self._retry, deadline=latest)

    async def responses(
        self, info: ModelInfo, request: GenerateRequest, deadline: float | None
    ) -> AsyncGenerator[Response, None]:
        """Yield the responses to a request, which is sent again until the first one comes."""
        clock = asyncio.get_running_loop().time
        start = clock()

        async def begin(
            replica: Replica,
        ) -> tuple[Replica, Response, AsyncGenerator[Response, None]]:
            sampling = with_remaining_deadline(request.sampling, clock() - start)
            sampling = {**self._common, **sampling}
            responses = replica.transport.generate(info.name, replace(request, sampling=sampling))
            try:
                with replica.watching(info):
                    return replica, await anext(responses), responses
            except StopAsyncIteration:
                raise ServerError("the server sent no response") from None

        latest = _earlier(deadline, start, request.sampling.get("deadline_ms"))
        replica, first, rest = await with_retries(
            self._replicas.sender(begin), self._retry, deadline=latest
        )
        # from here on a failure is the caller's: the parts that came cannot be taken back
        with replica.requesting():
            async with aclosing(rest):
                response: Response | None = first
                while response is not None:
                    yield response
                    with replica.watching(info):
                        response = await anext(rest, None)

    async def all_responses(
        self, info: ModelInfo, request: GenerateRequest, deadline: float | None
    ) -> list[Response]:
        """Return all responses to a request."""
        async with aclosing(self.responses(info, request, deadline)) as responses:
            return [response async for response in responses]

    async def ready(self) -> bool:
        """Return whether a server and its model are ready; False without a connection."""
        try:
            return await self._replicas.any_of(self._read_ready)
        except ServerUnavailable:
            # no address is known
            return False

    async def status(self) -> Status:
        """Return the state of the server and its models, without retries."""
        return await self._replicas.ask(self._read_status)

    async def models(self) -> list[ModelState]:
        """Return the server's models and their states, ready or not."""
        return await self._replicas.ask(lambda transport: transport.models())

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        await self._replicas.close()

    async def _query_info(self) -> ModelInfo:
        return await self._replicas.ask(self._read_info)

    async def _read_info(self, transport: Transport) -> ModelInfo:
        model = self._model or only_ready_model(await transport.models())
        if model is None:
            raise ServerUnavailable("the server has no ready model")
        return await _config_of(model, transport)

    async def _read_ready(self, transport: Transport) -> bool:
        if not await transport.server_ready():
            return False
        model = self._model or only_ready_model(await transport.models())
        return model is not None and await transport.model_ready(model)

    async def _read_status(self, transport: Transport) -> Status:
        models = await transport.models()
        ready = {each.name for each in models if each.ready}
        model = self._model or (ready.pop() if len(ready) == 1 else None)
        return Status(
            server=await transport.server_identity(),
            server_ready=await transport.server_ready(),
            models=tuple(models),
            model=model,
            model_ready=model is not None and await transport.model_ready(model),
        )


async def _config_of(model: str, transport: Transport) -> ModelInfo:
    return ModelInfo.from_config(await transport.model_config(model))


def _earlier(deadline: float | None, start: float, milliseconds: float | None) -> float | None:
    """Return the earlier of `deadline` and `start` plus `milliseconds`, if either is given."""
    deadlines = [] if deadline is None else [deadline]
    if milliseconds is not None:
        deadlines.append(start + milliseconds / 1e3)
    return min(deadlines, default=None)
