"""Clients of the models and adapters that requests name, and the check of token ids.

The name of an adapter is `MODEL:ADAPTER`, as of SGLang and OpenAI. If one model has it, `ADAPTER` will do, as of vLLM.

Clients of OpenAI's embeddings send ids of OpenAI's tokenizer. Another model has most of these ids too, and would answer
with a wrong vector. Ids of a model's own tokenizer have its special tokens, which OpenAI's have not.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Generic, TypeVar, cast

from fastapi import Query

from varlen_client.aio import AsyncClient
from varlen_client.calls import TokenizedText
from varlen_client.errors import InvalidRequest, ModelNotFound, ServerUnavailable, VarlenClientError
from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.bodies import AND_ADAPTER, Ignore, TextFields
from varlen_client.gateway.metrics import GatewayMetrics
from varlen_client.gateway.tools import ChatForms
from varlen_client.tasks.row_task import RowTask
from varlen_client.transport.session import RetryPolicy
from varlen_client.wire import Inputs, ModelInfo, ModelState, Pairs, only_ready_model

_Answer = TypeVar("_Answer")

# Callers of the gateway send requests again themselves.
_RETRIES = RetryPolicy(max_retries=2)
# Methods whose answer to ids of another tokenizer does not show the mistake.
_CHECKS_IDS = ("embed", "sparse_embed", "classify")
# Longest time for which a state of the server is known: `/health` and `/` may need no key.
_STATE_SECONDS = 1.0
# The same for infos and adapters. A model may be loaded again with other sizes.
_INFO_SECONDS = 30.0
# Longest question for the adapters of a model.
_ADAPTERS_SECONDS = 5.0

Connect = Callable[[str | None], AsyncClient]

# Tokenized to find the special tokens around a text.
_SAMPLE = "a"
_REMEDY = (
    "send texts (OpenAIEmbeddings of LangChain sends them with check_embedding_ctx_length=False)"
)

# What the request that runs has: the tenant of its API key, None without keys, and the model in its query.
TENANT: ContextVar[str | None] = ContextVar("tenant of a request", default=None)
_QUERY_MODEL: ContextVar[str | None] = ContextVar("model in the query of a request", default=None)

# Tenant of a request that comes from this process, in its scope; no client can write there.
IN_PROCESS = "varlen.tenant"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model, the name by which a request may ask for it, and its client.

    Attributes:
        name: `MODEL:ADAPTER` with an adapter.
        options: the client's argument for the adapter.
    """

    name: str
    client: AsyncClient
    options: Mapping[str, str]


class _Shared(Generic[_Answer]):
    """A question that the server gets once in a second, however many ask here."""

    def __init__(self, ask: Callable[[], Coroutine[object, object, _Answer]]) -> None:
        self._ask = ask
        self._asking = asyncio.Lock()
        self._found: _Answer | None = None
        self._error: VarlenClientError | None = None
        self._asked_at = -math.inf

    async def answer(self) -> _Answer:
        """Return the answer, or raise the error."""
        async with self._asking:
            if time.monotonic() - self._asked_at > _STATE_SECONDS:
                try:
                    self._found, self._error = await self._ask(), None
                except VarlenClientError as error:
                    self._error = error
                self._asked_at = time.monotonic()
            if self._error is not None:
                raise self._error.with_traceback(None)
            return cast("_Answer", self._found)


class Models:
    """The models of one server.

    Args:
        default: the model of requests that name none; None is the only ready model.
    """

    def __init__(self, default: str | None, connect: Connect) -> None:
        self._default = default
        self._connect = connect
        # by model and tenant: as many as there are models and API keys
        self._clients: dict[tuple[str | None, str | None], AsyncClient] = {}
        self._health = _Shared(self._ask_health)
        self._descriptions = _Shared(self._describe)
        self._infos: dict[str, ModelInfo] = {}
        self._infos_until = -math.inf
        # when they were asked, and what came
        self._adapters: dict[str, tuple[float, Mapping[str, str] | None]] = {}
        # models and adapters by the names that requests have for them
        self._adapted: dict[str, tuple[str, str]] = {}
        self._adapted_until = -math.inf

    async def get(self, name: str | None) -> NamedModel:
        """Return a model by the name in the body or query of a request.

        Args:
            name: the name, or `MODEL:ADAPTER`; fields of their own stand in it as in `RequestBody`.

        Raises:
            InvalidRequest: the body and the query have different names, or the request has two adapters.
            ModelNotFound: the server has no such model or adapter, or several models and none was named.
            ServerUnavailable: no model is ready.
        """
        name, _, adapter = (name or "").partition(AND_ADAPTER)
        in_query = _QUERY_MODEL.get()
        if name and in_query and name != in_query:
            raise InvalidRequest(
                f"the request has the model {name!r}, and {in_query!r} in its query; send one of them"
            )
        wanted = name or in_query or self._default
        own = ""
        if (wanted, TENANT.get()) not in self._clients or wanted is None:
            wanted, own = await self._model_and_adapter(wanted)
        if adapter and own not in ("", adapter):
            raise InvalidRequest(
                f"the request has the adapter {adapter!r}, and {own!r} in the name of its model; send one of them"
            )
        if adapter and not own:
            await self._check_adapter(wanted, adapter)
        adapter = adapter or own
        full = f"{wanted}:{adapter}" if adapter else wanted
        return NamedModel(full, self._client(wanted), {"adapter": adapter} if adapter else {})

    async def ready(self) -> list[str]:
        """Return the names of the models that are ready."""
        models = await self._client(None).models()
        return sorted({model.name for model in models if model.ready})

    async def described(self) -> list[tuple[ModelState, ModelInfo | None]]:
        """Return all models in the order of their names; ready ones with their info."""
        return await self._descriptions.answer()

    async def _describe(self) -> list[tuple[ModelState, ModelInfo | None]]:
        states: dict[str, ModelState] = {}
        for state in await self._client(None).models():
            # of several versions, one that is ready
            if state.ready or state.name not in states:
                states[state.name] = state
        infos = await self._infos_of([name for name, state in states.items() if state.ready])
        return [(states[name], infos.get(name)) for name in sorted(states)]

    async def _infos_of(self, names: Sequence[str]) -> dict[str, ModelInfo]:
        """Return the infos of models that have one, over one connection."""
        now = time.monotonic()
        if now > self._infos_until:
            self._infos, self._infos_until = {}, now + _INFO_SECONDS
        known = {name: self._infos[name] for name in names if name in self._infos}
        if len(known) < len(names):
            known |= await self._client(None).model_infos(
                [name for name in names if name not in known]
            )
        self._infos = known
        return known

    async def is_healthy(self) -> bool:
        """Return whether the server answers, and the default model, or any, is ready."""
        return await self._health.answer()

    async def _ask_health(self) -> bool:
        try:
            names = await self.ready()
        except VarlenClientError:
            return False
        default = self._default or ""
        return bool({default, default.rpartition(":")[0]} & set(names) if default else names)

    async def close(self) -> None:
        """Close all clients; calls in progress fail."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def listed(self) -> list[tuple[str, str]]:
        """Return the names of ready models and of their adapters, none first."""
        names = await self.ready()
        found = await asyncio.gather(*map(self.adapters, names))
        return [
            (name, adapter)
            for name, adapters in zip(names, found, strict=True)
            for adapter in ("", *(each for each, reason in (adapters or {}).items() if not reason))
        ]

    async def adapters(
        self, name: str, *, seconds: float = _INFO_SECONDS
    ) -> Mapping[str, str] | None:
        """Return the adapters of a model of the server; None if they are not known.

        See `AsyncClient.adapters`.

        Args:
            seconds: longest time since the server was asked.
        """
        asked_at, found = self._adapters.get(name, (-math.inf, None))
        now = time.monotonic()
        if now - asked_at > seconds:
            found = await self._ask_adapters(self._client(name))
            self._adapters[name] = now, found
        return found

    async def _ask_adapters(self, client: AsyncClient) -> Mapping[str, str] | None:
        try:
            info = await client.model_info(timeout=_ADAPTERS_SECONDS)
            if info.backend != "varlen" or info.settings.get("adapters") == "none":
                return {}
            return await client.adapters(timeout=_ADAPTERS_SECONDS)
        except VarlenClientError:
            # a model that takes no texts, or of an older server
            return None

    async def _model_and_adapter(self, name: str | None) -> tuple[str, str]:
        """Return what `_existing` returns, without a question to the server for each request."""
        now = time.monotonic()
        if now > self._adapted_until:
            self._adapted, self._adapted_until = {}, now + _INFO_SECONDS
        if name is None or name not in self._adapted:
            model, adapter = await self._existing(name)
            _, known = self._adapters.get(model, (0.0, None))
            if name is None or adapter not in (known or {}):
                # other names would fill the memory
                return model, adapter
            self._adapted[name] = model, adapter
        return self._adapted[name]

    async def _existing(self, name: str | None) -> tuple[str, str]:
        """Return the name of a model that the server has, and its adapter or nothing."""
        # clients of other names would fill the memory
        models = await self._client(None).models()
        names = {model.name for model in models}
        if name is None:
            name = only_ready_model(models)
            if name is None:
                raise ServerUnavailable("the server has no ready model")
        if name in names:
            return name, ""
        model, _, adapter = name.rpartition(":")
        if model in names:
            await self._check_adapter(model, adapter)
            return model, adapter
        owners = [
            each
            for each in sorted({model.name for model in models if model.ready})
            if name in (await self.adapters(each) or {})
        ]
        if len(owners) == 1:
            return owners[0], name
        if owners:
            named = ", ".join(f"{each}:{name}" for each in owners)
            raise ModelNotFound(f"several models have the adapter {name!r}; write one of {named}")
        raise ModelNotFound(f"the server has no model {name!r}")

    async def _check_adapter(self, model: str, adapter: str) -> None:
        """Raise ModelNotFound if a model is known to have no such adapter."""
        found = await self.adapters(model)
        if found is not None and adapter not in found:
            # it may have been loaded again
            found = await self.adapters(model, seconds=_STATE_SECONDS)
        # the server says why it serves one of them not
        if found is not None and adapter not in found:
            has = ", ".join(f"{model}:{each}" for each, reason in found.items() if not reason)
            remedy = f"write one of {has}" if has else "it has none: leave it out"
            raise ModelNotFound(f"the model {model!r} has no adapter {adapter!r}; {remedy}")

    def _client(self, name: str | None) -> AsyncClient:
        # questions about the server have no tenant
        key = name, None if name is None else TENANT.get()
        if key not in self._clients:
            self._clients[key] = self._connect(name)
        return self._clients[key]


def tenant_of(key: str) -> str:
    """Return the tenant of an API key, which does not tell the key.

    Callers of different keys share the server equally.
    """
    return sha256(key.encode()).hexdigest()[:16]


def check_special_tokens(sample: TokenizedText, rows: Sequence[Sequence[int]]) -> None:
    """Raise InvalidRequest unless each row has the special tokens of a sample around it."""
    count = len(sample.special)
    start = sample.special.index(False) if False in sample.special else count
    stop = count - sample.special[start:][::-1].index(False) if start < count else count
    before, after = list(sample.token_ids[:start]), list(sample.token_ids[stop:])
    for index, row in enumerate(rows):
        begins = list(row[:start]) == before
        ends = list(row[max(start, len(row) - len(after)) :]) == after
        if not (begins and ends):
            pairs = zip(sample.token_ids, sample.tokens, strict=True)
            named = [f"{each} ({name})" for each, name in pairs]
            raise InvalidRequest(
                f"row {index}: the token ids are not {' '.join([*named[:start], '…', *named[stop:]])}, as by this"
                f" model's tokenizer; {_REMEDY}, or ids of that tokenizer with its special tokens"
            )


async def _check_ids(model: NamedModel, rows: Sequence[Sequence[int]], timeout: float) -> None:
    """Raise InvalidRequest unless a model takes token ids, and its tokenizer made these."""
    info = await model.client.model_info()
    if info.inputs and "input_ids" not in info.inputs:
        raise InvalidRequest(f"model {info.name!r} takes texts, and no token ids; {_REMEDY}")
    if not info.inputs or "text" in info.inputs:
        (found,) = await model.client.tokenize([_SAMPLE], timeout=timeout)
        check_special_tokens(found, rows)


async def read_query_model(
    model: Annotated[str | None, Query(description="The model, if the body has no name.")] = None,
) -> None:
    """Keep the model that the query of a request names, for `Models.get`."""
    _QUERY_MODEL.set(model)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What routes need: models, settings, metrics, and the forms of answers."""

    models: Models
    settings: GatewaySettings
    metrics: GatewayMetrics
    forms: ChatForms

    @property
    def ignore_fields(self) -> Ignore | None:
        """Function that counts the names of ignored fields; None where they are refused."""
        return None if self.settings.strict else self.metrics.count_ignored

    async def answer(
        self,
        name: str | None,
        task: RowTask[_Answer],
        inputs: Inputs | Pairs,
        *,
        text_fields: TextFields | None,
        **options: Any,
    ) -> tuple[str, _Answer, int | None]:
        """Return a model's name, its answer to rows, and the number of their tokens.

        The tokens are counted in the metrics.

        Args:
            task, inputs, options: arguments of `AsyncClient.counted`.
            text_fields: fields of the request that say how its texts are cut; None where no text is.

        Raises:
            InvalidRequest: these fields contradict each other, or the token ids are of another tokenizer.
        """
        if text_fields is not None:
            options |= text_fields.truncation_options(auto_truncate=self.settings.auto_truncate)
        model = await self.models.get(name)
        options |= model.options
        timeout = self.settings.timeout_seconds
        if task.method in _CHECKS_IDS and isinstance(inputs[0], list):
            await _check_ids(model, cast("Sequence[list[int]]", inputs), timeout)
        answer, tokens = await model.client.counted(task, inputs, timeout=timeout, **options)
        self.metrics.count_tokens(tokens or 0)
        return model.name, answer, tokens

    async def info(self, name: str | None) -> ModelInfo:
        """Return what the config of a model says; arguments are as in `answer`."""
        return await (await self.models.get(name)).client.model_info()

    @classmethod
    def of(cls, settings: GatewaySettings, connect: Connect | None = None) -> Gateway:
        """Return the gateway of these settings; `connect` replaces gRPC in tests."""

        def over_grpc(model: str | None) -> AsyncClient:
            tenant = None if model is None else TENANT.get()
            return AsyncClient(
                settings.url,
                model,
                retry=_RETRIES,
                tenant=tenant,
                watch_seconds=settings.watch_seconds,
            )

        models = Models(settings.model, connect or over_grpc)
        return cls(models, settings, GatewayMetrics(), ChatForms(settings))
