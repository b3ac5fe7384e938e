"""The inputs that a model can declare; `execution.packing` fills them for each batch."""

import torch

from varlen.memory.usage import Size
from varlen.program.program import Value
from varlen.program.recorder import Recorder


def token_ids(ops: Recorder) -> Value:
    """Return the token ids of all sequences, one sequence after the other."""
    return ops.input("token_ids", ("tokens",), torch.int32)


def position_ids(ops: Recorder) -> Value:
    """Return the position of each token in its sequence, from 0."""
    return ops.input("position_ids", ("tokens",), torch.int32)


def type_ids(ops: Recorder) -> Value:
    """Return the token type of each token."""
    return ops.input("type_ids", ("tokens",), torch.int32)


def cu_seqlens(ops: Recorder) -> Value:
    """Return the cumulative start of each sequence, then the number of tokens."""
    return ops.input("cu_seqlens", (Size(1, sequences=1),), torch.int32)


def unpooled_lengths(ops: Recorder) -> Value:
    """Return, for each sequence, the number of tokens at its start that are not pooled."""
    return ops.input("unpooled_lengths", ("sequences",), torch.int32)


def normalize(ops: Recorder) -> Value:
    """Return, for each sequence, whether its vector is normalized to length 1."""
    return ops.input("normalize", ("sequences",), torch.bool)


def normalize_tokens(ops: Recorder) -> Value:
    """Return, for each token, whether its vector is normalized to length 1."""
    return ops.input("normalize_tokens", ("tokens",), torch.bool)


def mask_rows(ops: Recorder) -> Value:
    """Return the tokens to predict, by their place in the batch."""
    return ops.input("mask_rows", ("masks",), torch.int32)


def slots(ops: Recorder) -> Value:
    """Return the slot of each token in the KV caches: block · block_size + place."""
    return ops.input("slots", ("tokens",), torch.int64)


def block_tables(ops: Recorder) -> tuple[Value, Value, Value, Value]:
    """Return the new tokens, contexts and blocks of sequences, for `attention_paged`."""
    bounds = (Size(1, sequences=1),)
    return (
        cu_seqlens(ops),
        ops.input("context_lens", ("sequences",), torch.int32),
        ops.input("block_ids", ("blocks",), torch.int32),
        ops.input("cu_blocks", bounds, torch.int32),
    )


def source_tables(ops: Recorder) -> tuple[Value, Value, Value, Value]:
    """Return rows, lengths and blocks of the sources that tokens read, for `attention_paged`.

    Each token is a row of its own, whose context is its whole source.
    """
    bounds = (Size(1, tokens=1),)
    return (
        ops.input("source_rows", bounds, torch.int32),
        ops.input("source_lens", ("tokens",), torch.int32),
        ops.input("source_block_ids", ("source_blocks",), torch.int32),
        ops.input("cu_source_blocks", bounds, torch.int32),
    )


def logit_rows(ops: Recorder) -> Value:
    """Return the tokens whose logits are read, by their place in the batch."""
    return ops.input("logit_rows", ("logit_rows",), torch.int32)
