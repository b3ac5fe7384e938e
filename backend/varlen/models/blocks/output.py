"""The output layer of decoders: the logits of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from varlen.models.blocks.embedding_tables import check_tied
from varlen.models.checkpoint.layers import LayerReader, Linear

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.program.program import Value
    from varlen.program.recorder import Recorder


def read_output(read: LayerReader, table: Tensor, *shape: int, is_tied: bool) -> Linear:
    """Return the output layer, `[hidden, vocabulary]`, a view of the embedding table if they are tied.

    Args:
        read: reader of the checkpoint.
        table: `shape`, the embedding of each token.
        shape: vocabulary and hidden features.
        is_tied: whether config.json ties the two.

    Raises:
        CheckpointError: the checkpoint has another matrix than the table, though it says that they are tied.
    """
    vocabulary, hidden = shape
    if not is_tied:
        return read.linear(["lm_head"], hidden, [vocabulary], bias=False)
    check_tied(read, "lm_head.weight", table, *shape)
    return read.computed(lambda: Linear(table.t(), None))


def suppress_tokens(output: Linear, tokens: Sequence[int]) -> Linear:
    """Return the output layer with logits of -inf for these tokens."""
    if not tokens:
        return output
    bias = output.weight.new_zeros(output.weight.shape[1]) if output.bias is None else output.bias
    bias = bias.clone()
    bias[list(tokens)] = -inf
    return Linear(output.weight, bias)


def record_output(ops: Recorder, output: Linear, hidden: Value) -> Value:
    """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""
    import torch

    logits = output.record(ops, hidden)
    return logits if logits.dtype == torch.float32 else ops.to_fp32(logits)
