"""The HTTP transport, on tritonclient.http.aio (aiohttp)."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import aiohttp.abc
import tritonclient.http.aio as triton_http
from tritonclient.utils import InferenceServerException

from varlen_client.errors import (
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.generation import GenerateRequest, Response
from varlen_client.transport.endpoint import Endpoint
from varlen_client.transport.transport import ServerIdentity, server_error, trace_headers
from varlen_client.wire import Arrays, InferRequest, ModelState

# The beginning of a line of an event stream, and the longest line; aiohttp takes twice its buffer.
_EVENT = b"data:"
_LONGEST_EVENT_BYTES = 1 << 22

_ERRORS: dict[str, type[VarlenClientError]] = {
    "400": InvalidRequest,
    "404": ModelNotFound,
    "413": InvalidRequest,
    "429": ServerUnavailable,
    "499": RequestCancelled,
    "502": ServerUnavailable,
    "503": ServerUnavailable,
    "504": RequestTimeout,
}


class HttpTransport:
    """Transport over a pool of kept-alive connections; cancelling a task closes its connection.

    The server does not notice that the connection is closed, so it still runs the request. Over gRPC
    it drops the request.
    """

    def __init__(self, endpoint: Endpoint, ca_file: Path | None) -> None:
        self._label = endpoint.label
        context = ssl.create_default_context(cafile=ca_file) if endpoint.tls else None
        self._client = triton_http.InferenceServerClient(
            endpoint.target,
            # By default tritonclient ends a request after 60 s. Only the caller's timeout applies.
            conn_timeout=None,
            ssl=endpoint.tls,
            ssl_context=context,
        )
        if endpoint.address is not None:
            # tritonclient takes no connector
            self._client._stub.detach()
            self._client._stub = aiohttp.ClientSession(
                connector=_connector(endpoint, context, limit=100),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        # tritonclient has no call for the endpoints of generation
        self._models_url = f"{'https' if endpoint.tls else 'http'}://{endpoint.target}/v2/models"
        self._session = aiohttp.ClientSession(
            connector=_connector(endpoint, context, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LONGEST_EVENT_BYTES,
        )

    async def server_ready(self) -> bool:
        with self._errors():
            return bool(await self._client.is_server_ready())

    async def model_ready(self, model: str) -> bool:
        with self._errors():
            return bool(await self._client.is_model_ready(model))

    async def server_identity(self) -> ServerIdentity:
        with self._errors():
            metadata = await self._client.get_server_metadata()
            return ServerIdentity(str(metadata["name"]), str(metadata["version"]))

    async def models(self) -> list[ModelState]:
        with self._errors():
            index = await self._client.get_model_repository_index()
            # A model that was never loaded has only a name.
            return [
                ModelState(model["name"], model.get("version", ""), model.get("state", ""))
                for model in index
            ]

    async def model_config(self, model: str) -> Mapping[str, object]:
        with self._errors():
            config: Mapping[str, object] = await self._client.get_model_config(model)
            return config

    async def infer(self, model: str, request: InferRequest) -> Arrays:
        inputs = []
        for tensor in request.tensors:
            shape = list(tensor.array.shape)
            infer_input = triton_http.InferInput(tensor.name, shape, tensor.datatype)
            inputs.append(infer_input.set_data_from_numpy(tensor.array, binary_data=True))
        with self._errors():
            result = await self._client.infer(
                model,
                inputs,
                outputs=[
                    triton_http.InferRequestedOutput(name, binary_data=True)
                    for name in request.outputs
                ],
                parameters=dict(request.parameters),
                headers=trace_headers(),
            )
            return {name: result.as_numpy(name) for name in request.outputs}

    async def generate(
        self, model: str, request: GenerateRequest
    ) -> AsyncGenerator[Response, None]:
        endpoint = "generate_stream" if request.stream else "generate"
        url = f"{self._models_url}/{quote(model, safe='')}/{endpoint}"
        with self._errors():
            async with self._session.post(
                url, json=request.values(), headers=trace_headers()
            ) as response:
                if response.status != 200:
                    raise _status_error(response.status, await response.read())
                if not request.stream:
                    yield _response(json.loads(await response.read()))
                    return
                async for line in response.content:
                    if line.startswith(_EVENT):
                        yield _response(json.loads(line.removeprefix(_EVENT)))

    async def close(self) -> None:
        await self._session.close()
        await self._client.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            raise _error(error.message(), error.status()) from None
        except aiohttp.ClientSSLError as error:
            raise ServerError(f"TLS with http server {self._label} failed: {error}") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            reason = str(error) or type(error).__name__
            raise ServerUnavailable(
                f"no connection to http server {self._label}: {reason}"
            ) from error
        except aiohttp.ClientResponseError as error:
            # its repr holds the whole request
            raise self._unexpected(error.message) from error
        except (aiohttp.ClientError, ValueError, LookupError, TypeError, AttributeError) as error:
            # tritonclient failed to parse the response.
            raise self._unexpected(repr(error)) from error

    def _unexpected(self, reason: str) -> ServerError:
        return ServerError(f"http server {self._label} sent an unexpected response: {reason}")


class _OneAddress(aiohttp.abc.AbstractResolver):
    """Resolves each host to one IP address, so that requests and certificates keep the name."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[aiohttp.abc.ResolveResult]:
        """Return the address for any host."""
        del family
        return [
            aiohttp.abc.ResolveResult(
                hostname=host,
                host=self._address,
                port=port,
                family=socket.AF_INET6 if ":" in self._address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        """No resources to release."""


def _connector(
    endpoint: Endpoint, context: ssl.SSLContext | None, *, limit: int
) -> aiohttp.TCPConnector:
    """Return a pool of at most `limit` connections to one server; 0 is no limit."""
    resolver = None if endpoint.address is None else _OneAddress(endpoint.address)
    return aiohttp.TCPConnector(ssl=context or True, limit=limit, resolver=resolver)


def _error(text: str | None, status: str | None) -> VarlenClientError:
    return server_error(text, status, _ERRORS)


def _status_error(status: int, body: bytes) -> VarlenClientError:
    try:
        text = str(json.loads(body.removeprefix(_EVENT))["error"])
    except (ValueError, LookupError, TypeError):
        # a proxy's page
        text = ""
    return _error(text, str(status))


def _response(content: Mapping[str, Any]) -> Response:
    """Return the outputs in an object of the generate endpoints.

    It has a list for several values only.

    Raises:
        VarlenClientError: the object is an error, which in the middle of a stream has no status.
    """
    if "error" in content:
        raise _error(str(content["error"]), None)
    return {name: value if isinstance(value, list) else [value] for name, value in content.items()}
