"""A server that runs the existing model, alone or with the new one beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from varlen.request.request import Float32Array
from varlen_tools.adopt.existing import Existing, Request, read_existing, read_tokenizer
from varlen_tools.adopt.load import Measured, compare_loads
from varlen_tools.adopt.view import with_parts
from varlen_tools.adopt.wish import AdoptError
from varlen_tools.serve.server import LOAD_SECONDS, ServerCommand, start_server


@dataclass(frozen=True, slots=True)
class Session:
    """A ready server."""

    address: str
    client: InferenceServerClient

    def read(self, model: str, output: str | None) -> Existing:
        metadata = self.client.get_model_metadata(model, as_json=True)
        given = self.config(model).get("input", ())
        optional = [each["name"] for each in given if each.get("optional")]
        return read_existing(model, metadata, optional, output)

    def config(self, model: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.client.get_model_config(model, as_json=True)["config"]
        return found

    def find_tokenizer(self, models: Iterable[str]) -> Existing | None:
        """Return how the tokenizer among models is asked; None if there is none."""
        found = (
            read_tokenizer(model, self.client.get_model_metadata(model, as_json=True))
            for model in models
        )
        return next((each for each in found if each is not None), None)

    def ask(self, requests: Sequence[Request]) -> list[Float32Array]:
        """Return the answer to each text: `[features]`, or `[tokens, features]`.

        Raises:
            AdoptError: an answer has another shape.
        """
        return [self._ask(request) for request in requests]

    def measure(
        self, models: Sequence[Sequence[Request]], concurrency: int, seconds: float
    ) -> list[Measured]:
        loads = compare_loads(self.address, models, concurrency=concurrency, seconds=seconds)
        return asyncio.run(loads)

    def _ask(self, request: Request) -> Float32Array:
        result = self.client.infer(
            request.model,
            list(request.inputs),
            outputs=request.outputs,
            parameters=dict(request.parameters),
        )
        answer = np.asarray(result.as_numpy(request.output), dtype=np.float32)
        if answer.ndim > 1 and answer.shape[0] == 1:
            answer = answer[0]
        if answer.ndim not in {1, 2}:
            raise AdoptError(
                f"{request.model} answers one text with {request.output} of the shape {answer.shape};"
                " adopt knows one row of features, or of tokens and features"
            )
        return answer


@contextmanager
def open_session(command: ServerCommand, view: Path, models: Sequence[str]) -> Iterator[Session]:
    """Start a server with models of a view, and end it.

    Raises:
        AdoptError: the server refuses a request.
        ServerError: it ends, or does not load a model.
    """
    folders = [view / name for name in with_parts(view, models)]
    with start_server(command, folders) as server:
        server.wait_ready(LOAD_SECONDS)
        address = server.grpc_url.removeprefix("grpc://")
        with InferenceServerClient(address) as client:
            try:
                yield Session(address, client)
            except InferenceServerException as error:
                raise AdoptError(f"the server refuses: {error.message()}") from None
