"""`/v1/embeddings` of OpenAI, with the fields of vLLM, NVIDIA NIM and Infinity."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import Field, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import OpenAIBody, Texts, rows_of, usage
from varlen_client.gateway.json_writing import Rows, json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.text_fields import TextFields, given_options
from varlen_client.gateway.unserved_fields import EMBEDDINGS
from varlen_client.row_options import InputType
from varlen_client.tasks import EMBED
from varlen_client.wire import Floats

# Input type of each task of Jina that chooses a prompt.
_JINA_TASKS: Mapping[str, InputType] = {
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "classification": "classification",
    "separation": "clustering",
}


class VectorFields(TextFields):
    """Options of vectors."""

    unserved = EMBEDDINGS

    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None
    prompt_name: StrictStr | None = None
    input_type: InputType | None = None
    cache_salt: StrictStr | None = None

    def options(self) -> dict[str, Any]:
        """Return the client's arguments, without truncation."""
        own = VectorFields.model_fields.keys() - TextFields.model_fields.keys()
        return given_options(**{name: getattr(self, name) for name in own})


class EmbeddingsBody(OpenAIBody, VectorFields):
    """A request to `/v1/embeddings`."""

    ids_field = "input"

    input: Texts
    output_dimension: int | None = Field(default=None, ge=1)
    """Infinity's name of `dimensions`, from litellm."""
    encoding_format: Literal["float", "base64"] = "float"
    modality: Literal["text"] = "text"
    task: Literal["retrieval.query", "retrieval.passage", "classification", "separation"] | None = (
        None
    )
    """Jina's name of `input_type`."""
    normalized: bool | None = None
    """Jina's name of `normalize`."""

    def options(self) -> dict[str, Any]:
        """Return the client's arguments, without truncation.

        Raises:
            InvalidRequest: an option has two names.
        """
        options = super().options()
        others = {
            "dimensions": ("output_dimension", self.output_dimension),
            "normalize": ("normalized", self.normalized),
            "input_type": ("task", None if self.task is None else _JINA_TASKS[self.task]),
        }
        for name, (other, value) in others.items():
            if value is not None and name in options:
                raise InvalidRequest(f"the request has {name} and {other}; send one of them")
            options |= given_options(**{name: value})
        return options


class InfinityEmbeddingsBody(EmbeddingsBody):
    """A request to `/infinity/embeddings`."""

    @property
    def is_cut_by_default(self) -> bool:
        """Whether texts are cut if nothing says it: Infinity cuts them."""
        return True


def add_embedding_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes of OpenAI's embeddings."""

    @app.post("/v1/embeddings", tags=["OpenAI"])
    async def embeddings(body: EmbeddingsBody) -> Response:
        """Embed texts or token ids; `dimensions` shortens the vectors of Matryoshka models."""
        return await _embed(gateway, body)

    @app.post("/infinity/embeddings", tags=["Infinity"])
    async def embed_as_infinity(body: InfinityEmbeddingsBody) -> Response:
        """Embed texts as `/v1/embeddings` does; a text that is too long is cut by default."""
        return await _embed(gateway, body)


async def _embed(gateway: Gateway, body: EmbeddingsBody) -> Response:
    name, vectors, tokens = await gateway.answer(
        body.model, EMBED, rows_of(body.input, "input"), text_fields=body, **body.options()
    )
    encode = ENCODINGS[body.encoding_format]
    answer: dict[str, Any] = {
        "object": "list",
        "data": Rows(
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(vectors)
        ),
        "model": name,
    }
    return json_response(answer if tokens is None else {**answer, "usage": usage(tokens)})


def _numbers(vector: Floats) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def encode_base64(vector: Floats) -> str:
    """Return numbers as OpenAI's base64: fp32, the least byte first."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


# Forms of a vector in JSON, by their names at OpenAI and Cohere.
ENCODINGS = {"float": _numbers, "base64": encode_base64}
