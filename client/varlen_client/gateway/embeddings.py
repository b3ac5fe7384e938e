"""Routes of vectors and labels: OpenAI's `/v1/embeddings`, vLLM's `/classify` and `/pooling`, and others.

`/v1/embeddings` has the fields of vLLM, NVIDIA NIM, Jina and Infinity too. Cohere has `/v1/embed` and `/v2/embed`,
KServe `infer`, and NeMo Guardrails `/v1/extract`, with the fields of `nemoguardrails.library.gliner.models` in its
documentation. `schema` and its answer follow the library gliner2.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from fastapi import Request
from pydantic import Field, StrictInt, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import (
    AND_ADAPTER,
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
from varlen_client.gateway.json_io import Blocks, Rows, json_bytes, json_response, listed, read_body
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.tei import check_token_features
from varlen_client.gateway.unserved_fields import COHERE, EMBEDDINGS, OUTPUTS, PROMPTS, TEXTS
from varlen_client.tasks import TASKS
from varlen_client.tasks.answers import RowAnswers, RowOutput, Vectors, text_of
from varlen_client.tasks.extraction import EXTRACT, EXTRACT_SCHEMA, Span
from varlen_client.tasks.labels import RerankOptions
from varlen_client.tasks.row_task import InputType, Pooling, RowTask
from varlen_client.tasks.tokens import TOKEN_CLASSIFY
from varlen_client.tasks.vectors import EMBED, SparseVector, several
from varlen_client.wire import Floats, ModelInfo

VectorType: TypeAlias = Literal["float", "base64"]

# Input type of each task of Jina that chooses a prompt.
_JINA_TASKS: Mapping[str, InputType] = {
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "classification": "classification",
    "separation": "clustering",
}
# Field of the body for each output.
_RETURNED: Mapping[str, str] = {
    "embed": "return_dense",
    "sparse_embed": "return_sparse",
    "token_embed": "return_colbert_vecs",
}
# Each type once; an answer of Cohere has all its vectors again for each.
_MAX_TYPES = 2


def encoded(array: Floats, name: VectorType) -> bytes:
    """Return the JSON of an array: numbers, or OpenAI's base64 of little-endian fp32."""
    if name == "base64":
        return b'"%b"' % base64.b64encode(array.astype("<f4", copy=False).tobytes())
    return json_bytes(array.tolist())


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
    windows: bool | None = None
    """Texts that are longer than the model are read in windows."""
    window_overlap: int | None = Field(default=None, ge=0)

    def truncation_options(self, *, auto_truncate: bool) -> dict[str, Any]:
        """Return the client's arguments; windows cut nothing unless the request says it."""
        if self.windows and self._is_cut() is None:
            return {}
        return super().truncation_options(auto_truncate=auto_truncate)

    def options(self) -> dict[str, Any]:
        """Return the client's arguments, without truncation."""
        named = {name: getattr(self, name) for name in _OPTIONS}
        return given_options(**named) | self.instruction_option()


_OPTIONS = VectorFields.model_fields.keys() - InstructionFields.model_fields.keys()


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
    late_chunking: bool = False
    """Jina's: the texts are chunks of one document, which the model reads as a whole, with a space between them."""
    return_dense: bool = True
    """This and the next two are the names of FlagEmbedding for the outputs of bge-m3."""
    return_sparse: bool = False
    return_colbert_vecs: bool = False

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
    rows = rows_of(body.input, "input")
    tasks = [task for task, name in _RETURNED.items() if getattr(body, name)]
    if body.late_chunking:
        return await _late_chunks(gateway, body, rows, tasks)
    if tasks != ["embed"]:
        return await _several(gateway, body, rows, tasks)
    name, vectors, tokens = await gateway.answer(
        body.model, EMBED, rows, text_fields=body, **body.options()
    )
    return _listed(name, body, vectors, tokens)


def _listed(name: str, body: EmbeddingsBody, vectors: Vectors, tokens: int | None) -> Response:
    """Return the answer with these vectors."""
    form = body.encoding_format
    data = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, encoded(vector, form))
        for index, vector in enumerate(vectors)
    )
    return listed(name, data, tokens)


async def _late_chunks(
    gateway: Gateway, body: EmbeddingsBody, rows: list[str] | list[list[int]], tasks: list[str]
) -> Response:
    """Answer with a vector for each chunk of a document.

    A document that is longer than the model is read in windows. The test of jina-ai/late-chunking that calls Jina's API
    joins chunks by a space.
    """
    if tasks != ["embed"]:
        raise InvalidRequest("late_chunking has only dense vectors; leave the other outputs out")
    chunks = [row for row in rows if isinstance(row, str)]
    if len(chunks) < len(rows):
        raise InvalidRequest("input has token ids, and late_chunking needs texts; send texts")
    for index, chunk in enumerate(chunks):
        if not chunk.strip():
            raise InvalidRequest(f"input[{index}] is blank, and so has no vector; leave it out")
    ends = list(accumulate(len(chunk) + 1 for chunk in chunks))
    spans = [(end - len(chunk) - 1, end - 1) for chunk, end in zip(chunks, ends, strict=True)]
    options = {**body.options(), "spans": spans, "windows": True}
    name, vectors, tokens = await gateway.answer(
        body.model, EMBED, [" ".join(chunks)], text_fields=None, **options
    )
    return _listed(name, body, vectors, tokens)


async def _several(
    gateway: Gateway, body: EmbeddingsBody, rows: list[str] | list[list[int]], tasks: list[str]
) -> Response:
    """Answer with the outputs of these tasks, which one pass makes."""
    if not tasks:
        raise InvalidRequest(
            f"the request has no output; set one of {', '.join(_RETURNED.values())}"
        )
    if "token_embed" in tasks:
        info = await gateway.info(body.model)
        check_token_features("input", rows, info.outputs.get("token_embeddings", (0,))[-1])
    name, found, tokens = await gateway.answer(
        body.model, several(tasks), rows, text_fields=body, tasks=tasks, **body.options()
    )

    def entry(index: int, row: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"object": "embedding", "index": index}
        if "embed" in row:
            fields["embedding"] = encoded(row["embed"], body.encoding_format)
        if "sparse_embed" in row:
            terms: SparseVector = row["sparse_embed"]
            fields["sparse_embedding"] = {
                "indices": terms.indices.tolist(),
                "values": terms.values.tolist(),
            }
        if "token_embed" in row:
            fields["colbert_vecs"] = encoded(row["token_embed"], body.encoding_format)
        return fields

    return listed(name, (entry(*each) for each in enumerate(found)), tokens)


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

    adapter: StrictStr | None = None


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
    model = name if parameters.adapter is None else f"{name}{AND_ADAPTER}{parameters.adapter}"
    _, vectors, _ = await gateway.answer(
        model, EMBED, body.inputs[0].rows(), text_fields=parameters, **parameters.options()
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


@dataclass(frozen=True, slots=True)
class Classes:
    """Scores of all labels, in the order of the checkpoint.

    Attributes:
        scores: [rows, labels].
        best: index of the label of the largest logit of each row, also where scores are equal.
    """

    scores: Floats
    labels: Sequence[str]
    best: Sequence[int]


def _read_classes(answers: RowAnswers) -> Classes:
    scores, labels, logits = (answers.joined(output) for output in answers.outputs[:3])
    return Classes(scores, [*map(text_of, labels[0])], logits.argmax(axis=1).tolist())


CLASS_SCORES: RowTask[Classes] = RowTask(
    "classify",
    RerankOptions,
    (RowOutput("scores"), RowOutput("labels", dtype=np.object_), RowOutput("logits")),
    _read_classes,
    pooling="classify",
)
TOKEN_SCORES: RowTask[list[Floats]] = replace(
    TOKEN_CLASSIFY,
    options=RerankOptions,
    outputs=(RowOutput("scores", 2),),
    pooling="token_classify",
)


class ClassifyBody(OpenAIBody, TextFields):
    """A request to `/classify`."""

    ids_field = "input"
    unserved = TEXTS

    input: Texts
    use_activation: bool | None = None
    """false returns the logits."""
    cache_salt: StrictStr | None = None


class PoolingBody(OpenAIBody, VectorFields):
    """A request to `/pooling`."""

    ids_field = "input"
    unserved = PROMPTS

    input: Texts
    task: Pooling | None = None
    """By default the task of the model."""
    encoding_format: Literal["float", "base64"] = "float"
    use_activation: bool | None = None
    """As in `/classify` for labels; vLLM's name of `normalize` for vectors."""


# By the output of the model and its number of dimensions.
_POOLINGS: Mapping[tuple[str, int], RowTask[Any]] = {
    **{
        (first.name, first.rank): task
        for task in TASKS
        if task.pooling is not None
        for first in task.requested({})[:1]
    },
    ("logits", 1): CLASS_SCORES,
    ("logits", 2): TOKEN_SCORES,
}


async def classify(gateway: Gateway, body: ClassifyBody) -> Response:
    """Return the scores of all labels of each row, and the name of the best."""
    rows = rows_of(body.input, "input")
    activation = "none" if body.use_activation is False else "auto"
    options = given_options(activation=activation, cache_salt=body.cache_salt)
    name, found, tokens = await gateway.answer(
        body.model, CLASS_SCORES, rows, text_fields=body, **options
    )
    data = (
        {
            "index": index,
            "label": found.labels[found.best[index]],
            "probs": scores.tolist(),
            "num_classes": len(scores),
        }
        for index, scores in enumerate(found.scores)
    )
    return listed(name, data, tokens, prefix="classify")


async def pooling(gateway: Gateway, body: PoolingBody) -> Response:
    """Return vectors or scores of labels, of each row or of its tokens."""
    rows = rows_of(body.input, "input")
    info = await gateway.info(body.model)
    asked, width = _pooling_of(info, body.task)
    if str(asked.pooling).startswith("token_"):
        check_token_features("input", rows, width)
    name, found, tokens = await gateway.answer(
        body.model, asked, rows, text_fields=body, **_options(body, asked)
    )
    data = (
        {"index": index, "object": "pooling", "data": encoded(array, body.encoding_format)}
        for index, array in enumerate(found.scores if isinstance(found, Classes) else found)
    )
    return listed(name, data, tokens, prefix="pool")


def _pooling_of(info: ModelInfo, task: str | None) -> tuple[RowTask[Any], int]:
    """Return the task of a model's answer, by default its first, and the output's width.

    Raises:
        InvalidRequest: it has no output for `/pooling`, or another task is asked for.
    """
    served = [
        (found, dims[-1])
        for name, dims in info.outputs.items()
        if (found := _POOLINGS.get((name, len(dims)))) is not None
    ]
    for found, width in served:
        if task in (None, found.pooling):
            return found, width
    if served:
        tasks = ", ".join(dict.fromkeys(str(found.pooling) for found, _ in served))
        raise InvalidRequest(
            f"task is {task}; model {info.name!r} has the task {tasks}: leave task out"
            if len(served) == 1
            else f"task is {task}; model {info.name!r} has the tasks {tasks}: send one of them"
        )
    names = ", ".join(dict.fromkeys(name for name, _ in _POOLINGS))
    outputs = ", ".join(info.outputs) or "no outputs"
    raise InvalidRequest(f"model {info.name!r} has {outputs}; pooling needs one of {names}")


def _options(body: PoolingBody, task: RowTask[Any]) -> dict[str, Any]:
    """Return the client's arguments, without truncation.

    Raises:
        InvalidRequest: the task has no such option, or `normalize` has both its names.
    """
    options = body.options()
    known = task.options.__annotations__.keys()
    if body.use_activation is not None:
        if "activation" in known:
            options["activation"] = "auto" if body.use_activation else "none"
        elif body.normalize is not None:
            raise InvalidRequest("the request has normalize and use_activation; send one of them")
        else:
            options["normalize"] = body.use_activation
    wrong = sorted(options.keys() - known)
    if wrong:
        name = "use_activation" if body.normalize is None and wrong[0] == "normalize" else wrong[0]
        raise InvalidRequest(f"{name} is not for the task {task.pooling}; leave it out")
    return options


class ExtractBody(RequestBody, TextFields):
    """A request to `/v1/extract`."""

    unserved = TEXTS

    text: StrictStr
    labels: ListOf[StrictStr] | None = Field(default=None, min_length=1)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    threshold: float = Field(default=0.5, ge=0, le=1)
    flat_ner: bool | None = None
    """By default false with labels, as there, and true with a schema."""
    multi_label: bool = False
    chunk_length: int | None = None
    """Ignored: a text is read as a whole, and one that the model does not take is refused."""
    overlap: int | None = None
    """Ignored, as `chunk_length`."""


async def extract(gateway: Gateway, body: ExtractBody) -> Response:
    """Find the spans of a text with one of the labels, or answer a schema."""
    if (body.labels is None) == (body.schema_ is None):
        raise InvalidRequest("the body has to have labels or schema, and not both")
    if body.schema_ is not None:
        asked = given_options(schema=body.schema_, threshold=body.threshold, flat_ner=body.flat_ner)
        _, found, _ = await gateway.answer(
            body.model, EXTRACT_SCHEMA, [body.text], text_fields=body, **asked
        )
        return json_response({"result": found[0]})
    options: dict[str, Any] = given_options(
        labels=body.labels,
        threshold=body.threshold,
        flat_ner=bool(body.flat_ner),
        multi_label=body.multi_label,
    )
    _, rows, _ = await gateway.answer(body.model, EXTRACT, [body.text], text_fields=body, **options)
    entities = (
        {
            "value": each.text,
            "suggested_label": each.label,
            "start_position": each.start,
            "end_position": each.end,
            "score": each.score,
        }
        for each in rows[0]
    )
    answer = {
        "entities": Rows(entities),
        "total_entities": len(rows[0]),
        "tagged_text": tagged(body.text, rows[0]),
    }
    return json_response(answer)


def tagged(text: str, spans: list[Span]) -> str:
    """Return a text with its spans as `[text](label)`; of spans that overlap, the first."""
    parts, end = [], 0
    for each in spans:
        if each.start >= end:
            parts += [text[end : each.start], f"[{each.text}]({each.label})"]
            end = each.end
    return "".join([*parts, text[end:]])
