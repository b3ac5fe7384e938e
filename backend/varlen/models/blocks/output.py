"""The output layer of decoders: the logits of the next token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen.errors import CheckpointError
from varlen.models.checkpoint.layers import LayerReader, Linear
from varlen.program.program import Value
from varlen.program.recorder import Recorder


def read_output(read: LayerReader, table: Tensor, *, is_tied: bool) -> Linear:
    """Return the output layer, `[hidden, vocabulary]`, a view of the embedding table if they are tied.

    Args:
        read: of the checkpoint.
        table: `[vocabulary, hidden]`, the embedding of each token.
        is_tied: whether config.json ties the two.

    Raises:
        CheckpointError: the checkpoint has another matrix than the table, though it says that they are tied.
    """
    name = "lm_head"
    if not is_tied:
        return read.linear([name], table.shape[1], [table.shape[0]], bias=False)
    if f"{name}.weight" in read and not torch.equal(
        read.tensor(f"{name}.weight", *table.shape), table
    ):
        raise CheckpointError(
            f'config.json has tie_word_embeddings true, but the tensor "{name}.weight" is not the embedding table;'
            " set tie_word_embeddings to false"
        )
    return Linear(table.t(), None)


def suppress_tokens(output: Linear, tokens: Sequence[int]) -> Linear:
    """Return the output layer with logits of -inf for these tokens."""
    if not tokens:
        return output
    bias = output.weight.new_zeros(output.weight.shape[1]) if output.bias is None else output.bias
    return Linear(
        output.weight, bias.index_fill(0, torch.tensor(tokens).to(bias.device), -torch.inf)
    )


def record_output(ops: Recorder, output: Linear, hidden: Value) -> Value:
    """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""
    logits = output.record(ops, hidden)
    return logits if logits.dtype == torch.float32 else ops.to_fp32(logits)
