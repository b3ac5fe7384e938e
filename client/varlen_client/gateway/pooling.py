"""`/classify` and `/pooling` of vLLM: scores of all labels, and the output of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import OpenAIBody, TextFields, Texts, given_options, rows_of
from varlen_client.gateway.embeddings import VectorFields, encoded
from varlen_client.gateway.json_writing import listed
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.tei import check_token_features
from varlen_client.gateway.unserved_fields import TEXTS
from varlen_client.row_answers import RowAnswers, RowOutput
from varlen_client.row_options import RerankOptions
from varlen_client.tasks import EMBED, HIDDEN, TOKEN_CLASSIFY, TOKEN_EMBED, RowTask
from varlen_client.wire import Floats, ModelInfo

_Task = Literal["embed", "token_embed", "classify", "token_classify"]


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
    names = [label.decode(errors="replace") for label in labels[0]]
    return Classes(scores, names, logits.argmax(axis=1).tolist())


CLASS_SCORES: RowTask[Classes] = RowTask(
    "classify",
    RerankOptions,
    (RowOutput("scores"), RowOutput("labels", dtype=np.object_), RowOutput("logits")),
    _read_classes,
)
TOKEN_SCORES: RowTask[list[Floats]] = replace(
    TOKEN_CLASSIFY,
    options=RerankOptions,
    outputs=(RowOutput("scores", 2),),
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

    input: Texts
    task: _Task | None = None
    """By default the task of the model."""
    encoding_format: Literal["float", "base64"] = "float"
    use_activation: bool | None = None
    """As in `/classify` for labels; vLLM's name of `normalize` for vectors."""


@dataclass(frozen=True, slots=True)
class _Pooling:
    """How `/pooling` answers with one output of a model.

    Attributes:
        name: vLLM's name of the task.
        read: function that returns the array of each row.
    """

    name: _Task
    task: RowTask[Any]
    read: Callable[[Any], Sequence[npt.NDArray[Any]]] = lambda found: found


# By the output of the model and its number of dimensions.
_POOLINGS = {
    ("sentence_embedding", 1): _Pooling("embed", EMBED),
    ("token_embeddings", 2): _Pooling("token_embed", TOKEN_EMBED),
    ("last_hidden_state", 2): _Pooling("token_embed", HIDDEN),
    ("logits", 1): _Pooling("classify", CLASS_SCORES, lambda each: each.scores),
    ("logits", 2): _Pooling("token_classify", TOKEN_SCORES),
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
    how, width = _pooling_of(info, body.task)
    if how.name.startswith("token_"):
        check_token_features("input", rows, width)
    name, found, tokens = await gateway.answer(
        body.model, how.task, rows, text_fields=body, **_options(body, how)
    )
    data = (
        {"index": index, "object": "pooling", "data": encoded(array, body.encoding_format)}
        for index, array in enumerate(how.read(found))
    )
    return listed(name, data, tokens, prefix="pool")


def _pooling_of(info: ModelInfo, task: str | None) -> tuple[_Pooling, int]:
    """Return how a model answers, and the width of its output.

    Raises:
        InvalidRequest: it has no output for `/pooling`, or another task is asked for.
    """
    for name, dims in info.outputs.items():
        how = _POOLINGS.get((name, len(dims)))
        if how is not None and task in (None, how.name):
            return how, dims[-1]
        if how is not None:
            raise InvalidRequest(
                f"task is {task}; model {info.name!r} has the task {how.name}: leave task out"
            )
    names = ", ".join(dict.fromkeys(name for name, _ in _POOLINGS))
    found = ", ".join(info.outputs) or "no outputs"
    raise InvalidRequest(f"model {info.name!r} has {found}; pooling needs one of {names}")


def _options(body: PoolingBody, how: _Pooling) -> dict[str, Any]:
    """Return the client's arguments, without truncation.

    Raises:
        InvalidRequest: the task has no such option, or `normalize` has both its names.
    """
    options = body.options()
    known = how.task.options.__annotations__.keys()
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
        raise InvalidRequest(f"{name} is not for the task {how.name}; leave it out")
    return options
