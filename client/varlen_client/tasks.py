"""The table of row tasks: what a method requests, and how its answer is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from varlen_client.errors import InvalidRequest
from varlen_client.row_answers import (
    ANY_WIDTH,
    TOKEN_COUNTS,
    ContextAnswer,
    Entity,
    FilledToken,
    LabelScore,
    Ranking,
    RowAnswers,
    RowOutput,
    Span,
    SparseVector,
    TokenLabel,
    Vectors,
    read_arrays,
    read_column,
    read_context_answers,
    read_entities,
    read_filled_masks,
    read_labels,
    read_matrix,
    read_ranking,
    read_spans,
    read_sparse_vectors,
    read_token_labels,
)
from varlen_client.row_options import (
    EmbedOptions,
    EntityOptions,
    ExtractOptions,
    MaskOptions,
    PredictOptions,
    QuestionOptions,
    RerankOptions,
    RowOptions,
    SparseOptions,
    TokenEmbedOptions,
)
from varlen_client.wire import Floats, ModelInfo, Parameters, check_not_a_string
from varlen_client.zero_shot import Entailment, read_entailment

_Answer = TypeVar("_Answer")

Outputs: TypeAlias = tuple[RowOutput, ...]
Options: TypeAlias = Mapping[str, Any]

# Elements of the forms of vectors.
_DTYPES: Mapping[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": np.int8,
    "binary": np.int8,
    "ubinary": np.uint8,
}
# Features in an element of `binary` and `ubinary`.
_BITS = 8
# Largest value of a request parameter.
_LARGEST_INTEGER = 2**63 - 1
# Parameters whose names differ in the protocol.
_WIRE_NAMES = {"priority": "request_priority"}
# Options of the call, not of its requests.
_CALL_OPTIONS = ("timeout", "on_progress")


@dataclass(frozen=True, slots=True)
class RowTask(Generic[_Answer]):
    """A method of the clients that sends rows, and returns an `_Answer`.

    Attributes:
        outputs: requested outputs, or a function that returns them for options.
        read: function that returns the answer, given the outputs of all requests.
        needs_width: width of the first output, if only one is served.
        takes_pairs: whether a row may be a pair of texts.
        row_by_row: whether each row is its own request, since the server pads the rows of one to the longest.
        not_sent: options that the client itself follows.
    """

    method: str
    options: type
    outputs: Outputs | Callable[[Options], Outputs]
    read: Callable[[RowAnswers], _Answer]
    needs_width: int | None = None
    takes_pairs: bool = False
    row_by_row: bool = False
    not_sent: Collection[str] = ()

    def requested(self, options: Options) -> Outputs:
        """Return the outputs of a call; raises InvalidRequest for a wrong option."""
        return self.outputs if isinstance(self.outputs, tuple) else self.outputs(options)

    def of_model(self, outputs: Outputs, info: ModelInfo, *, counts_tokens: bool) -> Outputs:
        """Return requested outputs with the widths of a model.

        Args:
            counts_tokens: whether the number of tokens is requested too, if the model has it.

        Raises:
            InvalidRequest: the model does not serve them.
        """
        if counts_tokens and TOKEN_COUNTS.name in info.outputs and TOKEN_COUNTS not in outputs:
            outputs = (*outputs, TOKEN_COUNTS)
        found = tuple(output.of_model(self.method, info) for output in outputs)
        if self.needs_width not in (None, found[0].width):
            raise InvalidRequest(
                f"model {info.name!r} gives {found[0].width} values per row; "
                f"{self.method} needs {self.needs_width}"
            )
        return found


def parameters_of(
    method: str, declared: type, options: Options, not_sent: Collection[str] = ()
) -> Parameters:
    """Return the parameters of requests, by their names in the protocol.

    Args:
        not_sent: options that the client itself follows.

    Raises:
        TypeError: there is no such option.
        InvalidRequest: an integer is larger than the protocol's, or labels are a single string.
    """
    for name, value in options.items():
        if name not in declared.__annotations__:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise InvalidRequest(f"{name} is {value}; allowed: up to {_LARGEST_INTEGER}")
    return {
        _WIRE_NAMES.get(name, name): _labels(value) if name == "labels" else value
        for name, value in options.items()
        if value is not None and name not in (*_CALL_OPTIONS, *not_sent)
    }


def _labels(labels: Collection[str]) -> str:
    """Return labels as JSON: the protocol has no lists."""
    check_not_a_string(labels)
    return json.dumps(list(labels))


def _vector_output(options: Options) -> Outputs:
    given = options.get("output_dtype")
    dtype = "float32" if given is None else given
    if dtype not in _DTYPES:
        raise InvalidRequest(f'output_dtype is "{dtype}"; allowed: {", ".join(_DTYPES)}')
    packs = _BITS if dtype in ("binary", "ubinary") else 1
    return (RowOutput("sentence_embedding", 1, _DTYPES[dtype], options.get("dimensions"), packs),)


def _sparse_outputs(options: Options) -> Outputs:
    outputs = (
        RowOutput("indices", dtype=np.int32),
        RowOutput("values"),
        RowOutput("num_terms", dtype=np.int32),
    )
    terms = RowOutput("terms", dtype=np.object_)
    return (*outputs, terms) if options.get("with_terms") else outputs


def _label_outputs(options: Options) -> Outputs:
    top_k = options.get("top_k")
    if top_k is not None and top_k < 1:
        raise InvalidRequest(f"top_k is {top_k}; allowed: whole numbers from 1")
    return RowOutput("scores"), RowOutput("labels", dtype=np.object_), RowOutput("logits")


def _rank_output(options: Options) -> Outputs:
    # servers of every version have logits
    return (RowOutput("logits" if options.get("activation") is None else "scores"),)


EMBED: RowTask[Vectors] = RowTask("embed", EmbedOptions, _vector_output, read_matrix)
SPARSE_EMBED: RowTask[list[SparseVector]] = RowTask(
    "sparse_embed", SparseOptions, _sparse_outputs, read_sparse_vectors, not_sent=["with_terms"]
)
FILL_MASK: RowTask[list[list[list[FilledToken]]]] = RowTask(
    "fill_mask",
    MaskOptions,
    (
        RowOutput("token_ids", 2, np.int32),
        RowOutput("scores", 2),
        RowOutput("tokens", 2, np.object_),
        RowOutput("num_masks", dtype=np.int32),
    ),
    read_filled_masks,
)
EXTRACT: RowTask[list[list[Span]]] = RowTask(
    "extract",
    ExtractOptions,
    (
        # a row may have no span
        RowOutput("starts", dtype=np.int32, width=ANY_WIDTH),
        RowOutput("ends", dtype=np.int32, width=ANY_WIDTH),
        RowOutput("spans", dtype=np.object_, width=ANY_WIDTH),
        RowOutput("span_labels", dtype=np.object_, width=ANY_WIDTH),
        RowOutput("scores", width=ANY_WIDTH),
        RowOutput("num_spans", dtype=np.int32),
    ),
    read_spans,
)
# Its rows are pairs of a question and its context.
QUESTION_ANSWER: RowTask[list[list[ContextAnswer]]] = RowTask(
    "question_answer",
    QuestionOptions,
    (RowOutput("answers", dtype=np.object_),),
    read_context_answers,
    takes_pairs=True,
)

# Its rows are pairs of a text and a hypothesis; see zero_shot.py.
ENTAILMENT: RowTask[Entailment] = RowTask(
    "zero_shot",
    RowOptions,
    (RowOutput("logits"), RowOutput("labels", dtype=np.object_)),
    read_entailment,
    takes_pairs=True,
)
CLASSIFY: RowTask[Floats] = RowTask(
    "classify", RowOptions, (RowOutput("logits"),), read_matrix, takes_pairs=True
)
PREDICT: RowTask[list[list[LabelScore]]] = RowTask(
    "predict", PredictOptions, _label_outputs, read_labels, takes_pairs=True, not_sent=["top_k"]
)
# Its rows are pairs of the query and a document, and its model has one label.
RERANK: RowTask[Floats] = RowTask(
    "rerank", RerankOptions, _rank_output, read_column, needs_width=1, takes_pairs=True
)
# The same rows; the answer says the order of the documents too.
RANK: RowTask[Ranking] = RowTask(
    "rerank",
    RerankOptions,
    (RowOutput("scores"), RowOutput("logits")),
    read_ranking,
    needs_width=1,
    takes_pairs=True,
)
PREDICT_TOKENS: RowTask[list[list[TokenLabel]]] = RowTask(
    "predict_tokens",
    RerankOptions,
    (
        RowOutput("scores", 2),
        RowOutput("labels", dtype=np.object_),
        RowOutput("tokens", dtype=np.object_, width=ANY_WIDTH),
        TOKEN_COUNTS,
        # the best label is the one of the largest logit
        RowOutput("logits", 2),
    ),
    read_token_labels,
    takes_pairs=True,
)
PREDICT_ENTITIES: RowTask[list[list[Entity]]] = RowTask(
    "predict_entities",
    EntityOptions,
    (RowOutput("entities", dtype=np.object_),),
    read_entities,
)
TOKEN_CLASSIFY: RowTask[list[Floats]] = RowTask(
    "token_classify",
    RowOptions,
    (RowOutput("logits", 2),),
    read_arrays,
    takes_pairs=True,
    row_by_row=True,
)
HIDDEN: RowTask[list[Floats]] = replace(
    TOKEN_CLASSIFY, method="hidden", outputs=(RowOutput("last_hidden_state", 2),)
)
TOKEN_EMBED: RowTask[list[Floats]] = RowTask(
    "token_embed",
    TokenEmbedOptions,
    (RowOutput("token_embeddings", 2),),
    read_arrays,
    row_by_row=True,
)
