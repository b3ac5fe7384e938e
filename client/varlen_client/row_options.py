"""Options of the methods that send rows; an option is described where it appears first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

OutputDType: TypeAlias = Literal["float32", "float16", "int8", "binary", "ubinary"]
Activation: TypeAlias = Literal["auto", "softmax", "sigmoid", "none"]
AggregationStrategy: TypeAlias = Literal["none", "simple", "first", "average", "max"]
TruncationSide: TypeAlias = Literal["right", "left"]
InputType: TypeAlias = Literal[
    "query",
    "passage",
    "search_query",
    "search_document",
    "document",
    "classification",
    "clustering",
]


class RowOptions(TypedDict, total=False):
    """Options of every method; None is the default of each.

    truncate: cut texts that are too long; by default the server refuses them.
    truncate_prompt_tokens: cut texts to this many tokens, special tokens included; no `truncate` is needed.
    truncation_side: "left" cuts their beginning, "right" their end; by default the checkpoint decides.
    deadline_ms: milliseconds for each request, retries included. The server refuses requests that it cannot answer in
        time. By default no limit.
    priority: 0 to 9, larger runs sooner; by default 0.
    tenant: name of the client for whom the rows are; each has an equal share of the model.
    cache_salt: the server's caches share entries only between requests of the same salt.
    timeout: seconds for the whole call, retries included; by default no limit.
    on_progress: called with the number of rows answered so far, in the thread of the event loop. It must return
        quickly, and not call a sync client.
    """

    truncate: bool | None
    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None
    deadline_ms: float | None
    priority: int | None
    tenant: str | None
    cache_salt: str | None
    timeout: float | None
    on_progress: Callable[[int], None] | None


class EmbedOptions(RowOptions, total=False):
    """Options of embeddings.

    normalize: scale each vector to length 1; by default the checkpoint decides.
    prompt_name: name of the checkpoint's prompt that is put before each text; by default its default one.
    input_type: purpose of the texts, which chooses the checkpoint's prompt of this meaning instead of `prompt_name`.
    instruction: what the model has to find, in the place of the instruction in that prompt.
    prompt: a text that is put before each text, instead of a prompt of the checkpoint.
    dimensions: return only the first features; by default all.
    output_dtype: "float16", "int8", "binary" or "ubinary" return other types, the last two with 8 features in a byte:
        see docs/reference/wire.md. By default fp32.
    """

    normalize: bool | None
    prompt_name: str | None
    input_type: InputType | None
    instruction: str | None
    prompt: str | None
    dimensions: int | None
    output_dtype: OutputDType | None


class TokenEmbedOptions(RowOptions, total=False):
    """Options of vectors of tokens.

    prompt_name: "query" or "document", the role of the texts, or another prompt of the checkpoint. By default they have
        no role, and its default prompt.
    """

    normalize: bool | None
    prompt_name: str | None
    input_type: InputType | None


class SparseOptions(RowOptions, total=False):
    """Options of sparse vectors.

    max_active_dims: return only the terms of the largest weights; by default the checkpoint decides.
    with_terms: return the texts of the terms too.
    """

    prompt_name: str | None
    input_type: InputType | None
    instruction: str | None
    prompt: str | None
    max_active_dims: int | None
    with_terms: bool


class MaskOptions(RowOptions, total=False):
    """Options of filled masks.

    top_k: tokens of a mask; by default 5.
    """

    top_k: int | None


class ExtractOptions(RowOptions, total=False):
    """Options of spans.

    labels: labels such as "person", for all rows; needed.
    threshold: return spans whose score is above this; by default 0.5.
    flat_ner: no two spans share a word, the default; with False a span may contain another one.
    multi_label: a span may have several labels; by default the one of the highest score.
    """

    labels: Sequence[str]
    threshold: float | None
    flat_ner: bool | None
    multi_label: bool | None


class QuestionOptions(TypedDict, total=False):
    """Options of questions, by the names of the pipeline of transformers.

    top_k: most answers of each question; by default 1.
    max_answer_len: longest answer, in tokens; by default 15.
    handle_impossible_answer: that the context has no answer is an answer too, without characters; by default it is not.
    align_to_words: answers begin and end with whole words, the default.
    max_seq_len: longest window of a context with its question, in tokens; by default 384, or the longest sequence.
    doc_stride: tokens of a long context that two windows share; by default 128, or half a window.
    """

    top_k: int | None
    max_answer_len: int | None
    handle_impossible_answer: bool | None
    align_to_words: bool | None
    max_seq_len: int | None
    doc_stride: int | None
    deadline_ms: float | None
    priority: int | None
    tenant: str | None
    cache_salt: str | None
    timeout: float | None
    on_progress: Callable[[int], None] | None


class RerankOptions(RowOptions, total=False):
    """Options of scores.

    activation: makes scores of logits: "sigmoid", "softmax", "none", or "auto", which lets the checkpoint decide.
    instruction: what a reranker has to find, if it reads instructions; by default the checkpoint decides.
    """

    activation: Activation | None
    instruction: str | None


class EntityOptions(RowOptions, total=False):
    """Options of entities.

    aggregation_strategy: how tokens become entities, as in the pipeline of transformers; by default "simple".
    """

    aggregation_strategy: AggregationStrategy | None


class PredictOptions(RerankOptions, total=False):
    """Options of labels.

    top_k: return only the best labels of each row; by default all.
    """

    top_k: int | None


class TokenizeOptions(RowOptions, total=False):
    """Options of tokenization.

    add_special_tokens: add special tokens; by default to texts, not to chats, whose template has them.
    chat_template_kwargs: variables of the chat template, for chats.
    """

    prompt_name: str | None
    input_type: InputType | None
    add_special_tokens: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


class DetokenizeOptions(TypedDict, total=False):
    """Options of detokenization.

    skip_special_tokens: leave special tokens out, the default.
    """

    skip_special_tokens: bool | None
    deadline_ms: float | None
    priority: int | None
    timeout: float | None
    on_progress: Callable[[int], None] | None
