"""The inputs that a model can declare; `execution.packing` fills them for each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from varlen.memory.planner import Size

if TYPE_CHECKING:
    from varlen.program.program import Value
    from varlen.program.recorder import Axes, Recorder

# Beginning of the names of inputs that another program makes of labels.
LABEL_PART = "label_part_"
# What has a vector each: sequences, or sequences and spans of them.
Pooled: TypeAlias = Literal["sequences", "pooled"]


def token_ids(ops: Recorder) -> Value:
    """Return the token ids of all sequences, one sequence after the other."""
    return _declare(ops, "token_ids", ("tokens",))


def position_ids(ops: Recorder) -> Value:
    """Return the position of each token in its sequence, from 0."""
    return _declare(ops, "position_ids", ("tokens",))


def type_ids(ops: Recorder) -> Value:
    """Return the token type of each token."""
    return _declare(ops, "type_ids", ("tokens",))


def cu_seqlens(ops: Recorder) -> Value:
    """Return the cumulative start of each sequence, then the number of tokens."""
    return _declare(ops, "cu_seqlens", (Size(1, sequences=1),))


def cu_pooled(ops: Recorder) -> Value:
    """Return the cumulative start of each vector's rows, then the number of rows."""
    return _declare(ops, "cu_pooled", (Size(1, pooled=1),))


def pooled_rows(ops: Recorder) -> Value:
    """Return the tokens that are pooled, by their place in the batch.

    There is none if these are all, in order.
    """
    return _declare(ops, "pooled_rows", ("pooled_tokens",))


def unpooled_lengths(ops: Recorder, of: Pooled = "sequences") -> Value:
    """Return, for each vector, the number of tokens at its start that are not pooled."""
    return _declare(ops, "unpooled_lengths", (of,))


def normalize(ops: Recorder, of: Pooled = "sequences") -> Value:
    """Return, for each pooled vector, whether it is normalized to length 1."""
    return _declare(ops, "normalize", (of,), "bool")


def normalize_tokens(ops: Recorder) -> Value:
    """Return, for each token, whether its vector is normalized to length 1."""
    return _declare(ops, "normalize_tokens", ("tokens",), "bool")


def mask_rows(ops: Recorder) -> Value:
    """Return the tokens to predict, by their place in the batch."""
    return _declare(ops, "mask_rows", ("masks",))


def word_rows(ops: Recorder) -> Value:
    """Return the token of each word of the texts, by its place in the batch."""
    return _declare(ops, "word_rows", ("words",))


def label_rows(ops: Recorder) -> Value:
    """Return the token of each label, by its place in the batch."""
    return _declare(ops, "label_rows", ("labels",))


def label_part(ops: Recorder, number: int, size: int) -> Value:
    """Return a part of what the encoder of labels says of each label, `[labels, size]` fp32."""
    return _declare(ops, f"{LABEL_PART}{number}", ("labels", size), "float32")


def task_rows(ops: Recorder) -> Value:
    """Return the token of the task of each instance, by its place in the batch."""
    return _declare(ops, "task_rows", ("instances",))


def instance_numbers(ops: Recorder) -> Value:
    """Return the number of each instance in its task, from 0; -1 for classes."""
    return _declare(ops, "instance_numbers", ("instances",))


def cu_instances(ops: Recorder) -> Value:
    """Return the cumulative start of the labels of each instance, then the number of labels."""
    return _declare(ops, "cu_instances", (Size(1, instances=1),))


def cu_words(ops: Recorder) -> Value:
    """Return the cumulative start of the words of each sequence, then the number of words."""
    return _declare(ops, "cu_words", (Size(1, sequences=1),))


def cu_labels(ops: Recorder) -> Value:
    """Return the cumulative start of the labels of each sequence, then the number of labels."""
    return _declare(ops, "cu_labels", (Size(1, sequences=1),))


def slots(ops: Recorder) -> Value:
    """Return the slot of each token in the KV caches: block · block_size + place."""
    return _declare(ops, "slots", ("tokens",), "int64")


def block_tables(ops: Recorder) -> tuple[Value, Value, Value, Value]:
    """Return the new tokens, contexts and blocks of sequences, for `attention_paged`."""
    bounds = (Size(1, sequences=1),)
    return (
        cu_seqlens(ops),
        _declare(ops, "context_lens", ("sequences",)),
        _declare(ops, "block_ids", ("blocks",)),
        _declare(ops, "cu_blocks", bounds),
    )


def source_tables(ops: Recorder) -> tuple[Value, Value, Value, Value]:
    """Return rows, lengths and blocks of the sources that tokens read, for `attention_paged`.

    Each token is a row of its own, whose context is its whole source.
    """
    bounds = (Size(1, tokens=1),)
    return (
        _declare(ops, "source_rows", bounds),
        _declare(ops, "source_lens", ("tokens",)),
        _declare(ops, "source_block_ids", ("source_blocks",)),
        _declare(ops, "cu_source_blocks", bounds),
    )


def logit_rows(ops: Recorder) -> Value:
    """Return the tokens whose logits are read, by their place in the batch."""
    return _declare(ops, "logit_rows", ("logit_rows",))


def _declare(
    ops: Recorder,
    name: str,
    shape: Axes,
    dtype: Literal["bool", "int32", "int64", "float32"] = "int32",
) -> Value:
    import torch

    return ops.input(name, shape, getattr(torch, dtype))
