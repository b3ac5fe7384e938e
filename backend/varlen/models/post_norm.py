"""The forward pass of post-norm encoders, BERT and its relatives, over packed tokens.

Source: Devlin et al. 2018, arXiv:1810.04805 (post-norm layers of Vaswani et al. 2017, arXiv:1706.03762); the file of
each family names its own.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varlen.models.blocks import inputs
from varlen.models.blocks.heads import Heads, head_dtype
from varlen.models.blocks.relative_positions import bias_by_distance
from varlen.models.blocks.rotary import rotary_table
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.post_norm_families import POST_NORM_FAMILIES
from varlen.models.post_norm_family import (
    DISTANCE_BUCKETS,
    MAX_DISTANCE,
    EncoderSizes,
    PostNormFamily,
)
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder
from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """One transformer layer; queries, keys and values are side by side, and gate and up."""

    qkv: Linear
    attention_output: Linear
    attention_norm: Norm
    up: Linear
    is_gated: bool
    down: Linear
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class PostNormEncoder:
    """An encoder in one dtype.

    Attributes:
        token_table, position_table, type_table: `[rows, features]`; position 0 is the first row. A family without
            token types has one type, of zeros.
        cos_sin: `[positions, head features]` fp32, rotary positions instead of a position table.
        projection: from the features of the tables to those of the layers, if there is one.
        layers: a shared layer occurs several times.
        distance_bias: `[heads, distances]` fp32, added to the scores of all layers; see `bias_by_distance`.
        heads: the layers on top of it.
    """

    token_table: Tensor
    position_table: Tensor | None
    cos_sin: Tensor | None
    type_table: Tensor
    embedding_norm: Norm
    projection: Linear | None
    layers: tuple[PostNormLayer, ...]
    attention_heads: AttentionHeads
    distance_bias: Tensor | None
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
        types = inputs.type_ids(ops)
        if self.position_table is None:
            # what is added for a position is what is added for the type, which leaves nothing for the type
            second, tables = types, (self.type_table, torch.zeros_like(self.type_table))
        else:
            second, tables = inputs.position_ids(ops), (self.position_table, self.type_table)
        x = ops.embed_layer_norm(
            inputs.token_ids(ops),
            second,
            types,
            self.token_table,
            *tables,
            self.embedding_norm.weight,
            self.embedding_norm.bias,
            eps=self.norm_eps,
        )
        if self.projection is not None:
            x = self.projection.record(ops, x)
        for layer in self.layers:
            x = self._record_layer(ops, layer, x)
        return x

    def _record_layer(self, ops: Recorder, layer: PostNormLayer, x: Value) -> Value:
        qkv = layer.qkv.record(ops, x)
        if self.cos_sin is not None:
            qkv = ops.rotary(qkv, inputs.position_ids(ops), self.cos_sin, self.attention_heads)
        context = ops.attention_varlen(
            qkv,
            inputs.cu_seqlens(ops),
            self.attention_heads,
            self.distance_bias,
            scale=self.attention_heads.dim**-0.5,
        )
        attended = layer.attention_output.record(ops, context)
        x = self._add_norm(ops, attended, x, layer.attention_norm)
        if layer.is_gated:
            inner = ops.activate_gate(layer.up.record(ops, x), kind=self.activation)
        else:
            inner = layer.up.record_activated(ops, x, self.activation)
        return self._add_norm(ops, layer.down.record(ops, inner), x, layer.output_norm)

    def _add_norm(self, ops: Recorder, x: Value, residual: Value, norm: Norm) -> Value:
        return ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=self.norm_eps)


def load_post_norm(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> PostNormEncoder:
    """Return the encoder of a checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    family = POST_NORM_FAMILIES[checkpoint.config["model_type"]]
    sizes = family.read_sizes(checkpoint.config)
    with CheckpointWeights(checkpoint.folder) as weights:
        read = _Reader(weights, family, sizes, LayerReader(weights, dtype, device))
        last = LayerReader(weights, head_dtype(checkpoint, dtype), device)
        read_last = _Reader(weights, family, sizes, last)
        types = read.table("token_type", sizes.types) if sizes.types else None
        tokens = read.table("word", sizes.vocabulary)
        head_dim = sizes.hidden // sizes.heads
        by_name: dict[str, PostNormLayer] = {}
        names = family.layer_names(sizes)
        for name in names:
            if name not in by_name:
                by_name[name] = read.layer(name)
        layers = [by_name[name] for name in names]
        if layers:
            # not of a shared layer's other uses
            layers[-1] = replace(layers[-1], output_norm=read_last.output_norm(names[-1]))
        return PostNormEncoder(
            token_table=tokens,
            position_table=None if sizes.rotary else read.positions(),
            cos_sin=rotary_table(sizes.rotary, head_dim, device) if sizes.rotary else None,
            type_table=tokens.new_zeros(1, sizes.embedding) if types is None else types,
            embedding_norm=read.norm(family.embedding_norm, sizes.embedding),
            projection=read.projection(),
            layers=tuple(layers),
            attention_heads=AttentionHeads(sizes.heads, sizes.heads, head_dim),
            distance_bias=read.distance_bias(),
            activation=sizes.activation,
            norm_eps=sizes.norm_eps,
            heads=read_last.heads(checkpoint),
        )


class _Reader:
    """Reads the parts of an encoder by their names in a checkpoint."""

    def __init__(
        self,
        weights: CheckpointWeights,
        family: PostNormFamily,
        sizes: EncoderSizes,
        read: LayerReader,
    ) -> None:
        self._family = family
        self._sizes = sizes
        self._read = read
        self._prefix = family.prefix_of(weights)

    def table(self, name: str, rows: int) -> Tensor:
        name = f"{self._prefix}embeddings.{name}_embeddings.weight"
        return self._read.tensor(name, rows, self._sizes.embedding)

    def positions(self) -> Tensor:
        first = self._sizes.first_position
        return self.table("position", first + self._sizes.positions)[first:]

    def norm(self, name: str, size: int) -> Norm:
        return self._read.norm(f"{self._prefix}{name}", size)

    def projection(self) -> Linear | None:
        if not self._family.has_projection(self._sizes):
            return None
        name = f"{self._prefix}{self._family.projection}"
        return self._read.linear([name], self._sizes.embedding, [self._sizes.hidden])

    def distance_bias(self) -> Tensor | None:
        name = self._family.distance_bias
        if not name:
            return None
        table = self._read.tensor(
            f"{self._prefix}{name}.weight", DISTANCE_BUCKETS, self._sizes.heads
        )
        return bias_by_distance(table, max_distance=MAX_DISTANCE, is_causal=False)

    def layer(self, at: str) -> PostNormLayer:
        hidden, inner, names = self._sizes.hidden, self._sizes.inner, self._family.layer

        def linear(fan_in: int, fan_out: int, *parts: str) -> Linear:
            stored = [f"{self._prefix}{at}.{part}" for part in parts]
            widths = [fan_out // len(parts)] * len(parts)
            return self._read.linear(stored, fan_in, widths, bias=names.has_bias(parts[0]))

        up = linear(hidden, (1 + names.is_gated) * inner, *names.up)
        return PostNormLayer(
            qkv=linear(hidden, 3 * hidden, *names.qkv),
            attention_output=linear(hidden, hidden, names.attention_output),
            attention_norm=self.norm(f"{at}.{names.attention_norm}", hidden),
            up=_gate_first(up) if names.has_both else up,
            is_gated=names.is_gated,
            down=linear(inner, hidden, names.down),
            output_norm=self.output_norm(at),
        )

    def output_norm(self, at: str) -> Norm:
        return self.norm(f"{at}.{self._family.layer.output_norm}", self._sizes.hidden)

    def heads(self, checkpoint: Checkpoint) -> Heads:
        hidden, labels, head = self._sizes.hidden, checkpoint.num_labels, self._family.head
        if checkpoint.head_task == "classify":
            return Heads(
                dense=self._read.linear([self._family.head_dense(self._prefix)], hidden, [hidden]),
                activation=head.activation,
                classifier=self._read.linear([head.output], hidden, [labels]),
            )
        if checkpoint.head_task == "token_classify":
            return Heads(classifier=self._read.linear(["classifier"], hidden, [labels]))
        return Heads()


def _gate_first(layer: Linear) -> Linear:
    """Return a linear layer with the halves of its outputs exchanged."""
    half = layer.weight.shape[1] // 2
    bias = None if layer.bias is None else layer.bias.roll(half)
    return Linear(layer.weight.roll(half, 1), bias)
