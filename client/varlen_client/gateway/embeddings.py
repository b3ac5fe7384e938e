"""Embeddings of texts: OpenAI's `/v1/embeddings`, Cohere's `/v1/embed` and `/v2/embed`, and KServe's `infer`.

`/v1/embeddings` has the fields of vLLM, NVIDIA NIM, Jina and Infinity too.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Request
from pydantic import Field, StrictInt, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import (
    MAX_INPUTS,
    CutEnd,
    Fields,
    InstructionFields,
    ListOf,
    OpenAIBody,
    RequestBody,
    TextFields,
    Texts,
    given_options,
    rows_of,
)
from varlen_client.gateway.json_reading import read_body
from varlen_client.gateway.json_writing import Blocks, Rows, json_response, listed
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.unserved_fields import COHERE, EMBEDDINGS, OUTPUTS
from varlen_client.row_options import InputType
from varlen_client.tasks import EMBED
from varlen_client.wire import Floats

VectorType: TypeAlias = Literal["float", "base64"]

# Input type of each task of Jina that chooses a prompt.
_JINA_TASKS: Mapping[str, InputType] = {
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "classification": "classification",
    "separation": "clustering",
}
# Each type once; an answer of Cohere has all its vectors again for each.
_MAX_TYPES = 2


def encoded(array: Floats, name: VectorType) -> Any:
    """Return an array as numbers, or as OpenAI's base64: little-endian fp32."""
    if name == "base64":
        return base64.b64encode(array.astype("<f4").tobytes()).decode()
    return array.tolist()


class VectorFields(InstructionFields):
    """Options of vectors."""

    unserved = EMBEDDINGS

    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None
    prompt_name: StrictStr | None = None
    input_type: InputType | None = None
    prompt: StrictStr | None = None
    """The name of sentence-transformers: a text that is put before each text."""
    cache_salt: StrictStr | None = None

    def options(self) -> dict[str, Any]:
        """Return the client's arguments, without truncation."""
        own = VectorFields.model_fields.keys() - InstructionFields.model_fields.keys()
        named = {name: getattr(self, name) for name in own}
        return given_options(**named) | self.instruction_option()


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

    is_cut_by_default = True


async def embeddings(gateway: Gateway, body: EmbeddingsBody) -> Response:
    """Embed texts or token ids; `dimensions` shortens the vectors of Matryoshka models."""
    name, vectors, tokens = await gateway.answer(
        body.model, EMBED, rows_of(body.input, "input"), text_fields=body, **body.options()
    )
    data = (
        {"object": "embedding", "index": index, "embedding": encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    )
    return listed(name, data, tokens)


async def embed_as_infinity(gateway: Gateway, body: InfinityEmbeddingsBody) -> Response:
    """Embed texts as `/v1/embeddings` does; a text that is too long is cut by default."""
    return await embeddings(gateway, body)


class TextContent(Fields):
    """A part of an input; only texts are served."""

    noun = "content"

    type: Literal["text"]
    text: StrictStr


class Input(Fields):
    """An input in the form of an object."""

    noun = "input"

    content: ListOf[TextContent] = Field(min_length=1, max_length=1)


class CohereBody(RequestBody):
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
        return self.texts or [each.content[0].text for each in self.inputs or ()]


class CohereBodyV2(CohereBody):
    """A request to `/v2/embed`."""

    input_type: InputType


async def embed_v1(gateway: Gateway, body: CohereBody) -> Response:
    """Embed texts; the answer has a list of vectors, or with `embedding_types` several."""
    return await _embed_as_cohere(gateway, body, body.embedding_types)


async def embed_v2(gateway: Gateway, body: CohereBodyV2) -> Response:
    """Embed texts; the answer has vectors of each of `embedding_types`, by default `float`."""
    return await _embed_as_cohere(gateway, body, body.embedding_types or ["float"])


async def _embed_as_cohere(
    gateway: Gateway, body: CohereBody, types: list[VectorType] | None
) -> Response:
    """Return vectors of each of these types; None is one list of numbers."""
    rows = body.rows()
    options = given_options(input_type=body.input_type, dimensions=body.output_dimension)
    _, vectors, tokens = await gateway.answer(
        body.model, EMBED, rows, text_fields=TextFields(truncate=body.truncate), **options
    )
    meta = {} if tokens is None else {"meta": {"billed_units": {"input_tokens": tokens}}}
    names: list[VectorType] = types or ["float"]
    found = {name: Rows(map(partial(encoded, name=name), vectors)) for name in names}
    return json_response(
        {
            "id": uuid.uuid4().hex,
            "texts": rows,
            **meta,
            "response_type": "embeddings_by_type" if types else "embeddings_floats",
            "embeddings": found if types else found["float"],
        }
    )


class InputTensor(Fields):
    """The texts of a request in KServe's form."""

    noun = "input"

    name: Literal["input_text", "text"]
    datatype: Literal["BYTES"]
    shape: ListOf[StrictInt]
    data: StrictStr | Annotated[ListOf[StrictStr], Field(min_length=1)]
    """One text without a list is litellm's, whose shape is its length; it may be empty."""

    def rows(self) -> list[str]:
        """Return one text per row.

        Raises:
            InvalidRequest: they are not as many as `shape` says, or more than MAX_INPUTS.
        """
        if isinstance(self.data, str):
            return [self.data]
        count = len(self.data)
        if self.shape not in ([count], [count, 1]) or count > MAX_INPUTS:
            raise InvalidRequest(
                f"{self.name} has the shape {self.shape} and {count} texts; allowed: [texts] or [texts, 1],"
                f" with 1 to {MAX_INPUTS} texts"
            )
        return self.data


class OutputName(Fields):
    """A requested output."""

    noun = "output"
    unserved = OUTPUTS

    name: Literal["sentence_embedding"]


class InferParameters(VectorFields):
    """Parameters of a request; as at the server, an unknown one is refused."""

    is_strict = True


class InferBody(Fields):
    """A request to `/v2/models/NAME/infer`, as `triton/` models of litellm send it.

    litellm sends `input_text` BYTES [texts], which a server with `max_batch_size` refuses: it expects [texts, 1]. And
    it takes every output of the answer for vectors.
    """

    id: StrictStr | None = None
    inputs: ListOf[InputTensor] = Field(min_length=1, max_length=1)
    outputs: ListOf[OutputName] = Field(default=[], max_length=1)
    parameters: InferParameters = InferParameters()


async def infer(gateway: Gateway, name: str, request: Request) -> Response:
    """Embed the texts of the tensor `input_text`; the answer has one output, in JSON."""
    # litellm sends no Content-Type, without which FastAPI reads no body
    body = await read_body(InferBody, await request.body(), gateway.ignore_fields)
    parameters = body.parameters
    _, vectors, _ = await gateway.answer(
        name, EMBED, body.inputs[0].rows(), text_fields=parameters, **parameters.options()
    )
    output = {
        "name": "sentence_embedding",
        "datatype": "FP32",
        "shape": list(vectors.shape),
        "data": Blocks(vector.tolist() for vector in vectors),
    }
    return json_response(
        {
            **given_options(id=body.id),
            "model_name": name,
            "model_version": "1",
            "outputs": Rows([output]),
        }
    )
