"""Embeddings of OpenAI and Text Embeddings Inference: `/v1/embeddings`, `/embed`, `/embed_sparse`."""

from __future__ import annotations

import base64
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import Field, StrictInt, StrictStr
from starlette.responses import Response

from varlen_client.gateway.bodies import (
    OpenAIBody,
    RequestBody,
    Texts,
    json_response,
    rows_of,
    usage,
)
from varlen_client.gateway.models import Gateway
from varlen_client.row_answers import SparseVector
from varlen_client.tasks import EMBED, SPARSE_EMBED
from varlen_client.wire import Floats

Direction = Literal["left", "right", "Left", "Right"]


class EmbeddingsBody(OpenAIBody):
    """A request to `/v1/embeddings`."""

    input: Texts
    dimensions: StrictInt | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] = "float"
    prompt_name: StrictStr | None = None
    truncate: bool = False
    truncate_prompt_tokens: Literal[-1] | None = None
    """vLLM's name of `truncate`; only the model's limit is served."""
    truncation_side: Direction = "right"

    def options(self) -> dict[str, Any]:
        """Return the client's arguments."""
        truncate = self.truncate or self.truncate_prompt_tokens is not None
        return text_options(self.prompt_name, truncate=truncate, side=self.truncation_side)


class TextsBody(RequestBody):
    """What requests to `/embed` and `/embed_sparse` have."""

    inputs: Texts
    prompt_name: StrictStr | None = None
    truncate: bool = False
    truncation_direction: Direction = "right"

    def options(self) -> dict[str, Any]:
        """Return the client's arguments."""
        side = self.truncation_direction
        return text_options(self.prompt_name, truncate=self.truncate, side=side)


class EmbedBody(TextsBody):
    """A request to `/embed`."""

    normalize: bool = True
    dimensions: StrictInt | None = Field(None, ge=1)


def add_embedding_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes of embeddings."""

    @app.post("/v1/embeddings", tags=["OpenAI"])
    async def embeddings(body: EmbeddingsBody) -> Response:
        """Embed texts or token ids; `dimensions` shortens the vectors of Matryoshka models."""
        rows = rows_of(body.input, "input")
        name, vectors, tokens = await gateway.answer(
            body.model, EMBED, rows, dimensions=body.dimensions, **body.options()
        )
        encode = _base64 if body.encoding_format == "base64" else _list
        answer: dict[str, Any] = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": name,
        }
        return json_response(answer if tokens is None else {**answer, "usage": usage(tokens)})

    @app.post("/", tags=["Text Embeddings Inference"])
    @app.post("/embed", tags=["Text Embeddings Inference"])
    async def embed(body: EmbedBody) -> Response:
        """Embed texts or token ids; the answer is a list of vectors."""
        own = {"normalize": body.normalize, "dimensions": body.dimensions}
        rows = rows_of(body.inputs, "inputs")
        _, vectors, _ = await gateway.answer(body.model, EMBED, rows, **own, **body.options())
        return json_response(vectors.tolist())

    @app.post("/embed_sparse", tags=["Text Embeddings Inference"])
    async def embed_sparse(body: TextsBody) -> Response:
        """Embed texts or token ids sparsely: their terms and weights, the largest first."""
        rows = rows_of(body.inputs, "inputs")
        _, vectors, _ = await gateway.answer(body.model, SPARSE_EMBED, rows, **body.options())
        return json_response([_terms(vector) for vector in vectors])


def text_options(prompt_name: str | None, *, truncate: bool, side: Direction) -> dict[str, Any]:
    """Return the client's arguments for the prompt and the truncation of texts."""
    prompt = {} if prompt_name is None else {"prompt_name": prompt_name}
    return prompt | ({"truncate": True, "truncation_side": side.lower()} if truncate else {})


def _list(vector: Floats) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _terms(vector: SparseVector) -> list[dict[str, int | float]]:
    pairs = zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
    return [{"index": index, "value": value} for index, value in pairs]


def _base64(vector: Floats) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
