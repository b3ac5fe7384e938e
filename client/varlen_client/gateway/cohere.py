"""Embeddings of Cohere: `/v2/embed`, and `/v1/embed` of its older clients."""

from __future__ import annotations

import uuid
from typing import Any, Literal, TypeAlias

from fastapi import FastAPI
from pydantic import Field, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import MAX_INPUTS, Fields, ListOf, RequestBody
from varlen_client.gateway.embeddings import ENCODINGS
from varlen_client.gateway.json_writing import Rows, json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.text_fields import CutEnd, TextFields, given_options
from varlen_client.gateway.unserved_fields import COHERE
from varlen_client.row_options import InputType
from varlen_client.tasks import EMBED
from varlen_client.wire import Floats

VectorType: TypeAlias = Literal["float", "base64"]
# Each type once; an answer has all its vectors again for each.
_MAX_TYPES = 2


class TextContent(Fields):
    """A part of an input; only texts are served."""

    noun = "content"

    type: Literal["text"]
    text: StrictStr


class Input(Fields):
    """An input in the form of an object."""

    noun = "input"

    content: ListOf[TextContent] = Field(min_length=1, max_length=1)


class EmbedBody(RequestBody):
    """A request to `/v1/embed`."""

    unserved = COHERE

    texts: ListOf[StrictStr] | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    inputs: ListOf[Input] | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    input_type: InputType | None = None
    embedding_types: ListOf[VectorType] | None = Field(
        default=None, min_length=1, max_length=_MAX_TYPES
    )
    truncate: CutEnd = "END"
    """As by Cohere, a text that is too long is cut by default."""
    output_dimension: int | None = Field(default=None, ge=1)

    def rows(self) -> list[str]:
        """Return the texts.

        Raises:
            InvalidRequest: the request has neither `texts` nor `inputs`, or both.
        """
        if (self.texts is None) == (self.inputs is None):
            found = "neither texts nor" if self.texts is None else "texts and"
            raise InvalidRequest(f"the request has {found} inputs; send one of them")
        if self.texts is not None:
            return self.texts
        assert self.inputs is not None
        return [each.content[0].text for each in self.inputs]


class EmbedBodyV2(EmbedBody):
    """A request to `/v2/embed`."""

    input_type: InputType


def add_cohere_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes of Cohere's embeddings."""

    async def embed(body: EmbedBody) -> tuple[Floats, dict[str, Any]]:
        """Return the vectors, and what answers of every form have."""
        rows = body.rows()
        options = given_options(input_type=body.input_type, dimensions=body.output_dimension)
        fields = TextFields(truncate=body.truncate)
        _, vectors, tokens = await gateway.answer(
            body.model, EMBED, rows, text_fields=fields, **options
        )
        meta = {} if tokens is None else {"meta": {"billed_units": {"input_tokens": tokens}}}
        return vectors, {"id": uuid.uuid4().hex, "texts": rows, **meta}

    @app.post("/v1/embed", tags=["Cohere"])
    async def embed_v1(body: EmbedBody) -> Response:
        """Embed texts; the answer has a list of vectors, or with `embedding_types` several."""
        vectors, answer = await embed(body)
        if body.embedding_types is not None:
            return json_response(answer | _by_type(vectors, body.embedding_types))
        return json_response(
            answer
            | {"response_type": "embeddings_floats", "embeddings": _encoded(vectors, "float")}
        )

    @app.post("/v2/embed", tags=["Cohere"])
    async def embed_v2(body: EmbedBodyV2) -> Response:
        """Embed texts; the answer has vectors of each of `embedding_types`, by default `float`."""
        vectors, answer = await embed(body)
        return json_response(answer | _by_type(vectors, body.embedding_types or ["float"]))


def _by_type(vectors: Floats, types: list[VectorType]) -> dict[str, Any]:
    """Return the vectors in each of these types."""
    found = {name: _encoded(vectors, name) for name in dict.fromkeys(types)}
    return {"response_type": "embeddings_by_type", "embeddings": found}


def _encoded(vectors: Floats, name: VectorType) -> Rows:
    return Rows(map(ENCODINGS[name], vectors))
