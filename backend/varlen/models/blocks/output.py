"""The output layer of decoders: the logits of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from varlen.models.blocks.embedding_tables import check_tied
from varlen.models.checkpoint.layers import LayerReader, Linear, TokenTable

if TYPE_CHECKING:
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder


def read_output(
    read: LayerReader, table: TokenTable, *shape: int, is_tied: bool, name: str = "lm_head"
) -> Linear:
    """Return the output layer, `[hidden, vocabulary]`, a view of the embedding table if they are tied.

    Args:
        shape: vocabulary and hidden features.
        is_tied: whether config.json ties the two.

    Raises:
        CheckpointError: the checkpoint has another matrix than the table, though it says that they are tied.
    """
    vocabulary, hidden = shape
    if not is_tied:
        return read.output(name, hidden, vocabulary)
    check_tied(read, f"{name}.weight", table, *shape)
    return read.computed(lambda: Linear(table.rows.t(), None))


def suppress_tokens(output: Linear, tokens: Sequence[int], first: int = 0) -> Linear:
    """Return the output layer with logits of -inf for these tokens.

    Args:
        first: the first token of the layer, which may have a rank's part of them.
    """
    count = output.weight.shape[1]
    places = [token - first for token in tokens if 0 <= token - first < count]
    if not places:
        return output
    bias = output.weight.new_zeros(count) if output.bias is None else output.bias
    bias = bias.clone()
    bias[places] = -inf
    return Linear(output.weight, bias)


def record_output(ops: Recorder, output: Linear, hidden: Value, vocab_size: int) -> Value:
    """Record the output layer and return fp32 logits, `[rows, vocab_size]`, on rank 0."""
    import torch

    logits = output.record(ops, hidden)
    logits = logits if logits.dtype == torch.float32 else ops.to_fp32(logits)
    return ops.gather_columns(logits, vocab_size)
