"""A session of the asyncio client with one model of one server.

Requests are sent again while the server is unavailable, and a watch fails those whose model process has ended.
Timeouts and rows are above it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from varlen_client.errors import RequestTimeout, ServerError, ServerUnavailable
from varlen_client.generation import GenerateRequest, Response
from varlen_client.probe import probe_prompt, probe_rows
from varlen_client.transport.endpoint import Endpoint
from varlen_client.transport.retry import RetryPolicy, with_retries
from varlen_client.transport.transport import ServerIdentity, Transport
from varlen_client.transport.watch import ModelWatch
from varlen_client.waits import with_timeout
from varlen_client.wire import (
    Arrays,
    InferRequest,
    ModelInfo,
    ModelState,
    only_ready_model,
    with_remaining_deadline,
)

METADATA_TIMEOUT_SECONDS = 10.0
# A model may be loaded again with other sizes.
_INFO_SECONDS = 30.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Status:
    """State of the server and its models, as the server reports it."""

    server: ServerIdentity
    server_ready: bool
    models: tuple[ModelState, ...]
    model: str | None
    """The model that this client uses; None when none was chosen and none is ready."""
    model_ready: bool


class Session:
    """The connection to a server, for one model and one event loop.

    Args:
        endpoint: address of the server.
        model: the model's name; None for the only ready model of the server.
        retry: policy of requests that are sent again.
        ca_file: certificates to trust with TLS, instead of the default ones.
        tenant: tenant of all requests that name none.
        watch_seconds: argument of `ModelWatch`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str | None,
        retry: RetryPolicy,
        ca_file: Path | None,
        tenant: str | None = None,
        *,
        watch_seconds: float,
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._retry = retry
        self._ca_file = ca_file
        self._common = {} if tenant is None else {"tenant": tenant}
        self._watch = ModelWatch(self._probe, watch_seconds)
        self._transport: Transport | None = None
        # all connections of a pool may be held by requests that are not answered
        self._probe_transport: Transport | None = None
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

    async def infer(self, info: ModelInfo, request: InferRequest, deadline: float | None) -> Arrays:
        """Return the requested outputs."""
        transport = self._connected()
        clock = asyncio.get_running_loop().time
        start = clock()

        async def attempt() -> Arrays:
            parameters = with_remaining_deadline(request.parameters, clock() - start)
            parameters = {**self._common, **parameters}
            with self._watching(info):
                return await transport.infer(info.name, replace(request, parameters=parameters))

        latest = _earlier(deadline, start, request.parameters.get("deadline_ms"))
        return await with_retries(attempt, self._retry, deadline=latest)

    async def responses(
        self, info: ModelInfo, request: GenerateRequest, deadline: float | None
    ) -> AsyncGenerator[Response, None]:
        """Yield the responses to a request, which is sent again until the first one comes."""
        transport = self._connected()
        clock = asyncio.get_running_loop().time
        start = clock()

        async def begin() -> tuple[Response, AsyncGenerator[Response, None]]:
            sampling = with_remaining_deadline(request.sampling, clock() - start)
            sampling = {**self._common, **sampling}
            responses = transport.generate(info.name, replace(request, sampling=sampling))
            try:
                with self._watching(info):
                    return await anext(responses), responses
            except StopAsyncIteration:
                raise ServerError("the server sent no response") from None

        latest = _earlier(deadline, start, request.sampling.get("deadline_ms"))
        first, rest = await with_retries(begin, self._retry, deadline=latest)
        async with aclosing(rest):
            response: Response | None = first
            while response is not None:
                yield response
                with self._watching(info):
                    response = await anext(rest, None)

    async def all_responses(
        self, info: ModelInfo, request: GenerateRequest, deadline: float | None
    ) -> list[Response]:
        """Return all responses to a request."""
        async with aclosing(self.responses(info, request, deadline)) as responses:
            return [response async for response in responses]

    async def ready(self) -> bool:
        """Return whether the server and the model are ready; False without a connection."""
        try:
            return await self._with_metadata_timeout(self._read_ready())
        except (ServerUnavailable, RequestTimeout):
            return False

    async def status(self) -> Status:
        """Return the state of the server and its models, without retries."""
        return await self._with_metadata_timeout(self._read_status())

    async def models(self) -> list[ModelState]:
        """Return the server's models and their states, ready or not."""
        return await self._with_metadata_timeout(self._connected().models())

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        await self._watch.close()
        transports = self._transport, self._probe_transport
        self._transport = self._probe_transport = None
        for transport in transports:
            if transport is not None:
                await transport.close()

    def _watching(self, info: ModelInfo) -> AbstractContextManager[None]:
        """Return a context for a wait for the model."""
        return self._watch.waiting() if info.can_be_watched else nullcontext()

    async def _probe(self) -> None:
        """Send a small request to the model for which calls wait."""
        assert self._info is not None
        if self._probe_transport is None:
            self._probe_transport = _connect(self._endpoint, self._ca_file)
        name, transport = self._info.name, self._probe_transport
        if self._info.generates:
            async with aclosing(transport.generate(name, probe_prompt(self._info))) as responses:
                async for _ in responses:
                    pass
        else:
            await transport.infer(name, probe_rows(self._info))

    async def _query_info(self) -> ModelInfo:
        return await self._with_metadata_timeout(self._read_info())

    async def _read_info(self) -> ModelInfo:
        transport = self._connected()
        model = self._model or only_ready_model(await transport.models())
        if model is None:
            raise ServerUnavailable("the server has no ready model")
        return ModelInfo.from_config(await transport.model_config(model))

    async def _read_ready(self) -> bool:
        transport = self._connected()
        if not await transport.server_ready():
            return False
        model = self._model or only_ready_model(await transport.models())
        return model is not None and await transport.model_ready(model)

    async def _read_status(self) -> Status:
        transport = self._connected()
        models = await transport.models()
        model = self._model or only_ready_model(models)
        return Status(
            server=await transport.server_identity(),
            server_ready=await transport.server_ready(),
            models=tuple(models),
            model=model,
            model_ready=model is not None and await transport.model_ready(model),
        )

    async def _with_metadata_timeout(self, query: Coroutine[object, object, _T]) -> _T:
        """Return the result of a metadata query, which a working server answers at once."""
        try:
            return await with_timeout(query, METADATA_TIMEOUT_SECONDS)
        except TimeoutError:
            raise RequestTimeout(
                f"{self._endpoint.target} did not answer within {METADATA_TIMEOUT_SECONDS:g} s"
            ) from None

    def _connected(self) -> Transport:
        if self._transport is None:
            self._transport = _connect(self._endpoint, self._ca_file)
        return self._transport


def _connect(endpoint: Endpoint, ca_file: Path | None) -> Transport:
    """Return a transport for the event loop that runs now."""
    # Imported here: each protocol takes a few hundred milliseconds to import, and a process rarely
    # needs both.
    if endpoint.protocol == "grpc":
        from varlen_client.transport.grpc import GrpcTransport

        return GrpcTransport(endpoint, ca_file)
    from varlen_client.transport.http import HttpTransport

    return HttpTransport(endpoint, ca_file)


def _earlier(deadline: float | None, start: float, milliseconds: float | None) -> float | None:
    """Return the earlier of `deadline` and `start` plus `milliseconds`, if either is given."""
    deadlines = [] if deadline is None else [deadline]
    if milliseconds is not None:
        deadlines.append(start + milliseconds / 1e3)
    return min(deadlines, default=None)
