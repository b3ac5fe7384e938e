"""Labels and outputs of models: vLLM's `/classify` and `/pooling`, and NeMo Guardrails' `/v1/extract`.

`/v1/extract` has the fields of `nemoguardrails.library.gliner.models` in the documentation of NeMo Guardrails. `schema`
and its answer follow the library gliner2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import (
    ListOf,
    OpenAIBody,
    RequestBody,
    TextFields,
    Texts,
    given_options,
    rows_of,
)
from varlen_client.gateway.embeddings import VectorFields, encoded
from varlen_client.gateway.json_io import Rows, json_response, listed
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.tei import check_token_features
from varlen_client.gateway.unserved_fields import PROMPTS, TEXTS
from varlen_client.tasks import TASKS
from varlen_client.tasks.answers import RowAnswers, RowOutput, text_of
from varlen_client.tasks.extraction import EXTRACT, EXTRACT_SCHEMA, Span
from varlen_client.tasks.labels import RerankOptions
from varlen_client.tasks.row_task import Pooling, RowTask
from varlen_client.tasks.tokens import TOKEN_CLASSIFY
from varlen_client.wire import Floats, ModelInfo


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
