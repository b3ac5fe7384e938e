"""BERT: how its checkpoints name their tensors, and its forward pass over packed tokens.

Source: Devlin et al. 2018, arXiv:1810.04805 (post-norm layers of Vaswani et al. 2017, arXiv:1706.03762);
tensor names as Hugging Face transformers saves them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.models import inputs
from varlen.models.bert_checkpoint import activation_of, norm_eps_of, prefix_of
from varlen.models.checkpoint import Checkpoint
from varlen.models.config_file import read_int
from varlen.models.heads import Heads
from varlen.models.layers import LayerReader, Linear, Norm
from varlen.models.weights import CheckpointWeights
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder
from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class BertLayer:
    """One transformer layer; query, key and value are one matrix, side by side."""

    qkv: Linear
    attention_output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class Bert:
    """A BERT encoder in one dtype.

    Attributes:
        token_table, position_table, type_table: `[rows, hidden]`.
        heads: the layers on top of it.
    """

    token_table: Tensor
    position_table: Tensor
    type_table: Tensor
    embedding_norm: Norm
    layers: tuple[BertLayer, ...]
    num_heads: int
    activation: Activation
    norm_eps: float
    heads: Heads

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        return self.token_table.shape[0]

    @property
    def type_vocab_size(self) -> int:
        """Token types below this are valid."""
        return self.type_table.shape[0]

    def record(self, ops: Recorder) -> Value:
        """Record the encoder and return its last hidden state, `[tokens, hidden]`."""
        x = ops.embed_layer_norm(
            inputs.token_ids(ops),
            inputs.position_ids(ops),
            inputs.type_ids(ops),
            self.token_table,
            self.position_table,
            self.type_table,
            self.embedding_norm.weight,
            self.embedding_norm.bias,
            eps=self.norm_eps,
        )
        for layer in self.layers:
            x = self._record_layer(ops, layer, x)
        return x

    def _record_layer(self, ops: Recorder, layer: BertLayer, x: Value) -> Value:
        head_dim = layer.attention_output.weight.shape[0] // self.num_heads
        context = ops.attention_varlen(
            layer.qkv.record(ops, x),
            inputs.cu_seqlens(ops),
            AttentionHeads(self.num_heads, self.num_heads, head_dim),
            scale=head_dim**-0.5,
        )
        attended = layer.attention_output.record(ops, context)
        x = self._add_norm(ops, attended, x, layer.attention_norm)
        inner = layer.up.record_activated(ops, x, self.activation)
        return self._add_norm(ops, layer.down.record(ops, inner), x, layer.output_norm)

    def _add_norm(self, ops: Recorder, x: Value, residual: Value, norm: Norm) -> Value:
        return ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=self.norm_eps)


def load_bert(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Bert:
    """Return the BERT of a checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = checkpoint.config
    hidden, inner = checkpoint.hidden_size, read_int(config, "intermediate_size")
    with CheckpointWeights(checkpoint.folder) as weights:
        read = _BertReader(weights, hidden, LayerReader(weights, dtype, device))
        return Bert(
            token_table=read.table("word", read_int(config, "vocab_size")),
            position_table=read.table("position", checkpoint.position_limit),
            type_table=read.table("token_type", read_int(config, "type_vocab_size")),
            embedding_norm=read.norm("embeddings"),
            layers=tuple(
                read.layer(f"encoder.layer.{index}", inner)
                for index in range(read_int(config, "num_hidden_layers", lowest=0))
            ),
            num_heads=read_int(config, "num_attention_heads"),
            activation=activation_of(config),
            norm_eps=norm_eps_of(config),
            heads=read.heads(checkpoint.num_labels),
        )


class _BertReader:
    """Reads the parts of a BERT by their names in a checkpoint."""

    def __init__(self, weights: CheckpointWeights, hidden: int, read: LayerReader) -> None:
        self._hidden = hidden
        self._read = read
        # models with a head keep the encoder under a name of its own
        self._prefix = prefix_of(weights)
        self._has_pooler = f"{self._prefix}pooler.dense.weight" in weights

    def table(self, name: str, rows: int) -> Tensor:
        name = f"{self._prefix}embeddings.{name}_embeddings.weight"
        return self._read.tensor(name, rows, self._hidden)

    def norm(self, of: str) -> Norm:
        return self._read.norm(f"{self._prefix}{of}.LayerNorm", self._hidden)

    def linear(self, names: list[str], fan_in: int, fan_out: int) -> Linear:
        names = [f"{self._prefix}{name}" for name in names]
        return self._read.linear(names, fan_in, [fan_out] * len(names))

    def layer(self, at: str, inner: int) -> BertLayer:
        hidden = self._hidden
        qkv = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
        return BertLayer(
            qkv=self.linear(qkv, hidden, hidden),
            attention_output=self.linear([f"{at}.attention.output.dense"], hidden, hidden),
            attention_norm=self.norm(f"{at}.attention.output"),
            up=self.linear([f"{at}.intermediate.dense"], hidden, inner),
            down=self.linear([f"{at}.output.dense"], inner, hidden),
            output_norm=self.norm(f"{at}.output"),
        )

    def heads(self, num_labels: int) -> Heads:
        hidden = self._hidden
        return Heads(
            pooler=self.linear(["pooler.dense"], hidden, hidden) if self._has_pooler else None,
            classifier=(
                self._read.linear(["classifier"], hidden, [num_labels]) if num_labels else None
            ),
        )
