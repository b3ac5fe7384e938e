"""The head of a masked language model on top of a loaded encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.models.blocks.output import check_tied
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm, TokenTable
from varlen.request.request import MAX_TOP_K

if TYPE_CHECKING:
    from varlen.models.checkpoint.family import MaskedLMLayout
    from varlen.models.checkpoint.vector_layers import SpladeConfig
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder
    from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class MaskedLM:
    """A loaded head.

    Attributes:
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


def load_masked_lm(read: LayerReader, layout: MaskedLMLayout, table: TokenTable) -> MaskedLM:
    """Return the head of a checkpoint.

    Raises:
        CheckpointError: see `LayerReader`; or the checkpoint has another table than the embeddings, though it says that
            they are tied.
    """
    names, features = layout.names, layout.features
    dense = read.linear([names.dense], layout.hidden, [features], bias=layout.has_dense_bias)
    norm = read.norm(names.norm, features, bias=layout.has_norm_bias)
    weight, shape = f"{names.decoder}.weight", (layout.vocabulary, features)
    if layout.is_tied:
        check_tied(read, weight, table, *shape)
    else:
        table = read.token_table(weight, *shape)
    name = layout.bias_name(read)
    bias = read.tensor(name, layout.vocabulary) if name else None
    return MaskedLM(
        dense=dense,
        activation=layout.activation,
        norm=norm,
        norm_eps=layout.norm_eps,
        output=read.computed(lambda: Linear(table.rows.t(), bias)),
    )
