"""The head of a masked language model on top of a loaded encoder."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm
from varlen.models.checkpoint.masked_lm_layout import MaskedLMLayout
from varlen.models.checkpoint.sparse import SpladeConfig
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.program.program import Value
from varlen.program.recorder import Recorder
from varlen.request.request import MAX_TOP_K
from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class MaskedLM:
    """A loaded head.

    Attributes:
        dense, activation, norm, norm_eps: make a row of each token.
        output: `[features, vocabulary]`, a view of the embedding table if they are tied.
    """

    dense: Linear
    activation: Activation
    norm: Norm
    norm_eps: float
    output: Linear

    def record_rows(self, ops: Recorder, hidden: Value) -> Value:
        """Record what the product with the vocabulary reads, `[rows, features]`."""
        x = self.dense.record_activated(ops, hidden, self.activation)
        return ops.layer_norm(x, self.norm.weight, self.norm.bias, eps=self.norm_eps)

    def record_top_terms(self, ops: Recorder, hidden: Value) -> Value:
        """Record the most likely terms of each mask, `[masks, 2, terms]` fp32; see `top_terms`."""
        rows = self.record_rows(ops, ops.select_rows(hidden, inputs.mask_rows(ops)))
        weight, bias = self.output.weight, self.output.bias
        return ops.top_terms(rows, weight, bias, count=min(MAX_TOP_K, weight.shape[1]))

    def record_term_weights(self, ops: Recorder, hidden: Value, splade: SpladeConfig) -> Value:
        """Record the weight of each term for each sequence, `[sequences, vocabulary]` fp32."""
        rows = self.record_rows(ops, hidden)
        bounds, (weight, bias) = inputs.cu_seqlens(ops), (self.output.weight, self.output.bias)
        return ops.term_weights(rows, weight, bias, bounds, mode=splade.pooling, logs=splade.logs)


def load_masked_lm(
    folder: Path, layout: MaskedLMLayout, table: Tensor, dtype: torch.dtype, device: torch.device
) -> MaskedLM:
    """Return the head of a checkpoint in `dtype` on `device`.

    Args:
        folder: of the checkpoint.
        layout: of the head.
        table: `[vocabulary, features]`, the embedding of each token.
        dtype, device: of the encoder.

    Raises:
        CheckpointError: the checkpoint has another table than the embeddings, though it says that they are tied.
    """
    names = layout.names
    with CheckpointWeights(folder) as weights:
        read = LayerReader(weights, dtype, device)
        stored = layout.decoder_weight
        if not layout.is_tied:
            table = read.tensor(stored, *layout.table_shape)
        elif stored in read and not torch.equal(read.tensor(stored, *layout.table_shape), table):
            raise CheckpointError(
                f'config.json has tie_word_embeddings true, but the tensor "{stored}" is not the embedding table;'
                " set tie_word_embeddings to false"
            )
        bias = layout.bias_name(weights.names)
        return MaskedLM(
            dense=read.linear(
                [names.dense], layout.hidden, [layout.features], bias=layout.has_dense_bias
            ),
            activation=layout.activation,
            norm=read.norm(names.norm, layout.features, bias=layout.has_norm_bias),
            norm_eps=layout.norm_eps,
            output=Linear(table.t(), read.tensor(bias, layout.vocabulary) if bias else None),
        )
