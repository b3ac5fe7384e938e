"""Options of calls that send rows, and the requests that they make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from typing_extensions import TypedDict

from varlen_client.errors import InvalidRequest
from varlen_client.masks import MASK_TASK
from varlen_client.row_outputs import (
    Activation,
    OutputDType,
    RowOutput,
    RowTask,
    TruncationSide,
    vector_output,
)
from varlen_client.sparse import sparse_task
from varlen_client.token_labels import TOKEN_LABEL_TASK
from varlen_client.wire import (
    Inputs,
    Pairs,
    Parameters,
    Rows,
    read_inputs,
    read_inputs_or_pairs,
    read_query_and_documents,
)

# Of a request parameter.
_LARGEST_INTEGER = 2**63 - 1
# Parameters whose names differ in the protocol.
_WIRE_NAMES = {"priority": "request_priority"}
# Options of the call, not of its requests.
_CALL_OPTIONS = ("timeout", "on_progress")


class RowOptions(TypedDict, total=False):
    """Options of every method; None is the default of each.

    truncate: cut texts that are too long; by default the server refuses them.
    truncation_side: "left" cuts their beginning, "right" their end, the default.
    deadline_ms: milliseconds for each request, retries included. The server refuses requests that it cannot answer in
        time. By default no limit.
    priority: 0 to 9, larger runs sooner; by default 0.
    timeout: seconds for the whole call, retries included; by default no limit.
    on_progress: called with the number of rows answered so far, in the thread of the event loop. It must return
        quickly, and not call a sync client.
    """

    truncate: bool | None
    truncation_side: TruncationSide | None
    deadline_ms: float | None
    priority: int | None
    timeout: float | None
    on_progress: Callable[[int], None] | None


class EmbedOptions(RowOptions, total=False):
    """Options of embeddings.

    normalize: scale each vector to length 1; by default the checkpoint decides.
    prompt_name: of the checkpoint's prompt that is put before each text; by default its default one.
    dimensions: return the first features alone; by default all.
    output_dtype: "float16", "int8", "binary" or "ubinary" return other types, the last two with 8 features in a byte:
        see docs/reference/wire.md. By default fp32.
    """

    normalize: bool | None
    prompt_name: str | None
    dimensions: int | None
    output_dtype: OutputDType | None


class TokenEmbedOptions(RowOptions, total=False):
    """Options of vectors of tokens.

    normalize: see `EmbedOptions`.
    prompt_name: "query" or "document", the role of the texts, or another prompt of the checkpoint. By default they have
        no role, and its default prompt.
    """

    normalize: bool | None
    prompt_name: str | None


class SparseOptions(RowOptions, total=False):
    """Options of sparse vectors.

    prompt_name: see `EmbedOptions`.
    max_active_dims: return the terms of the largest weights alone; by default the checkpoint decides.
    with_terms: return the texts of the terms too.
    """

    prompt_name: str | None
    max_active_dims: int | None
    with_terms: bool


class MaskOptions(RowOptions, total=False):
    """Options of filled masks.

    top_k: tokens of a mask; by default 5.
    """

    top_k: int | None


class RerankOptions(RowOptions, total=False):
    """Options of scores.

    activation: makes scores of logits: "sigmoid", "softmax", "none", or "auto", which lets the checkpoint decide.
    """

    activation: Activation | None


class PredictOptions(RerankOptions, total=False):
    """Options of labels.

    top_k: return only the best labels of each row; by default all.
    """

    top_k: int | None


@dataclass(frozen=True, slots=True)
class RowRequests:
    """What a call asks for: outputs of rows.

    Attributes:
        task: the method and its outputs.
        rows: the checked input.
        parameters: of each request, by their names in the protocol.
        timeout, on_progress: see `RowOptions`.
    """

    task: RowTask
    rows: Rows
    parameters: Parameters
    timeout: float | None = None
    on_progress: Callable[[int], None] | None = None

    @classmethod
    def of(
        cls,
        task: RowTask,
        rows: Rows,
        options: Mapping[str, object],
        allowed: type,
        *,
        not_sent: Collection[str] = (),
    ) -> RowRequests:
        """Return the requests of a call.

        Args:
            task, rows: see the class.
            options: that were given.
            allowed: the TypedDict of the method's options.
            not_sent: those of them that the client itself follows.

        Raises:
            TypeError: there is no such option.
            InvalidRequest: an integer is larger than the protocol's.
        """
        for name, value in options.items():
            if name not in allowed.__annotations__:
                raise TypeError(f"{task.method}() got an unexpected keyword argument {name!r}")
            if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
                raise InvalidRequest(f"{name} is {value}; allowed: up to {_LARGEST_INTEGER}")
        parameters = {
            _WIRE_NAMES.get(name, name): value
            for name, value in options.items()
            if value is not None and name not in (*_CALL_OPTIONS, *not_sent)
        }
        given = cast(RowOptions, options)
        return cls(task, rows, parameters, given.get("timeout"), given.get("on_progress"))


def embed_requests(inputs: Inputs, options: Mapping[str, Any]) -> RowRequests:
    """Return the requests of `embed`."""
    output = vector_output(options.get("dimensions"), options.get("output_dtype"))
    return RowRequests.of(RowTask("embed", (output,)), read_inputs(inputs), options, EmbedOptions)


def sparse_requests(inputs: Inputs, options: Mapping[str, Any]) -> RowRequests:
    """Return the requests of `sparse_embed`."""
    task, rows = sparse_task(with_terms=options.get("with_terms", False)), read_inputs(inputs)
    return RowRequests.of(task, rows, options, SparseOptions, not_sent=["with_terms"])


def mask_requests(inputs: Inputs, options: Mapping[str, Any]) -> RowRequests:
    """Return the requests of `fill_mask`."""
    return RowRequests.of(MASK_TASK, read_inputs(inputs), options, MaskOptions)


def classify_requests(inputs: Inputs | Pairs, options: Mapping[str, Any]) -> RowRequests:
    """Return the requests of `classify`."""
    task = RowTask("classify", (RowOutput("logits"),))
    return RowRequests.of(task, read_inputs_or_pairs(inputs), options, RowOptions)


def predict_requests(inputs: Inputs | Pairs, options: Mapping[str, Any]) -> RowRequests:
    """Return the requests of `predict`.

    Raises:
        InvalidRequest: `top_k` is less than 1.
    """
    top_k = options.get("top_k")
    if top_k is not None and top_k < 1:
        raise InvalidRequest(f"top_k is {top_k}; at least 1")
    outputs = RowOutput("scores"), RowOutput("labels", dtype=np.object_)
    task, rows = RowTask("predict", outputs), read_inputs_or_pairs(inputs)
    return RowRequests.of(task, rows, options, PredictOptions, not_sent=["top_k"])


def rerank_requests(
    query: str, documents: Sequence[str], options: Mapping[str, Any]
) -> RowRequests:
    """Return the requests of `rerank`, whose model has one label."""
    # servers of every version have logits
    output = RowOutput("logits" if options.get("activation") is None else "scores")
    task = RowTask("rerank", (output,), needs_width=1)
    rows = read_query_and_documents(query, documents)
    return RowRequests.of(task, rows, options, RerankOptions)


def token_label_requests(inputs: Inputs | Pairs, options: Mapping[str, Any]) -> RowRequests:
    """Return the requests of `predict_tokens`."""
    return RowRequests.of(TOKEN_LABEL_TASK, read_inputs_or_pairs(inputs), options, RerankOptions)


def token_embed_requests(inputs: Inputs, options: Mapping[str, Any]) -> RowRequests:
    """Return the requests of `token_embed`."""
    task = RowTask("token_embed", (RowOutput("token_embeddings", rank=2),))
    return RowRequests.of(task, read_inputs(inputs), options, TokenEmbedOptions)


def token_requests(
    method: str, output: str, inputs: Inputs | Pairs, options: Mapping[str, Any]
) -> RowRequests:
    """Return the requests of a method with an output for each token."""
    task = RowTask(method, (RowOutput(output, rank=2),))
    return RowRequests.of(task, read_inputs_or_pairs(inputs), options, RowOptions)
