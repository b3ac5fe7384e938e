"""The inputs that a model can declare; `execution.packing` fills them for each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from varlen.memory.usage import Size

if TYPE_CHECKING:
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder
    from varlen.program.recording import Axes


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


def unpooled_lengths(ops: Recorder) -> Value:
    """Return, for each sequence, the number of tokens at its start that are not pooled."""
    return _declare(ops, "unpooled_lengths", ("sequences",))


def normalize(ops: Recorder) -> Value:
    """Return, for each sequence, whether its vector is normalized to length 1."""
    return _declare(ops, "normalize", ("sequences",), "bool")


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
    ops: Recorder, name: str, shape: Axes, dtype: Literal["bool", "int32", "int64"] = "int32"
) -> Value:
    import torch

    return ops.input(name, shape, getattr(torch, dtype))
