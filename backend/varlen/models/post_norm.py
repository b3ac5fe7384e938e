"""The forward pass of post-norm encoders, BERT and its relatives, over packed tokens.

Source: Devlin et al. 2018, arXiv:1810.04805 (post-norm layers of Vaswani et al. 2017, arXiv:1706.03762); the file of
each family names its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.models import inputs
from varlen.models.checkpoint import Checkpoint
from varlen.models.heads import Heads
from varlen.models.layers import LayerReader, Linear, Norm
from varlen.models.post_norm_families import POST_NORM_FAMILIES
from varlen.models.post_norm_family import (
    DISTANCE_BUCKETS,
    MAX_DISTANCE,
    EncoderSizes,
    PostNormFamily,
)
from varlen.models.relative_positions import bias_by_distance
from varlen.models.weights import CheckpointWeights
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder
from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """One transformer layer; query, key and value are one matrix, side by side."""

    qkv: Linear
    attention_output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class PostNormEncoder:
    """An encoder in one dtype.

    Attributes:
        token_table, position_table, type_table: `[rows, features]`; position 0 is the first row, and a family without
            token types has one type, of zeros.
        projection: from the features of the tables to those of the layers, if there is one.
        layers: a shared layer occurs several times.
        distance_bias: `[heads, distances]` fp32, added to the scores of all layers; see `bias_by_distance`.
        heads: the layers on top of it.
    """

    token_table: Tensor
    position_table: Tensor
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
        if self.projection is not None:
            x = self.projection.record(ops, x)
        for layer in self.layers:
            x = self._record_layer(ops, layer, x)
        return x

    def _record_layer(self, ops: Recorder, layer: PostNormLayer, x: Value) -> Value:
        context = ops.attention_varlen(
            layer.qkv.record(ops, x),
            inputs.cu_seqlens(ops),
            self.attention_heads,
            self.distance_bias,
            scale=self.attention_heads.dim**-0.5,
        )
        attended = layer.attention_output.record(ops, context)
        x = self._add_norm(ops, attended, x, layer.attention_norm)
        inner = ops.activate(layer.up.record(ops, x), kind=self.activation)
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
        types = read.table("token_type", sizes.types) if sizes.types else None
        tokens = read.table("word", sizes.vocabulary)
        positions = read.table("position", sizes.first_position + sizes.positions)
        layers: dict[str, PostNormLayer] = {}
        for name in family.layer_names(sizes):
            if name not in layers:
                layers[name] = read.layer(name)
        return PostNormEncoder(
            token_table=tokens,
            position_table=positions[sizes.first_position :],
            type_table=tokens.new_zeros(1, sizes.embedding) if types is None else types,
            embedding_norm=read.norm("embeddings.LayerNorm", sizes.embedding),
            projection=read.projection(),
            layers=tuple(layers[name] for name in family.layer_names(sizes)),
            attention_heads=AttentionHeads(sizes.heads, sizes.heads, sizes.hidden // sizes.heads),
            distance_bias=read.distance_bias(),
            activation=sizes.activation,
            norm_eps=sizes.norm_eps,
            heads=read.heads(checkpoint),
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

    def norm(self, name: str, size: int) -> Norm:
        return self._read.norm(f"{self._prefix}{name}", size)

    def projection(self) -> Linear | None:
        if not self._family.has_projection(self._sizes):
            return None
        sizes = self._sizes
        return self._linear([self._family.projection], sizes.embedding, sizes.hidden)

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
        qkv = [f"{at}.{part}" for part in (names.query, names.key, names.value)]
        return PostNormLayer(
            qkv=self._linear(qkv, hidden, hidden),
            attention_output=self._linear([f"{at}.{names.attention_output}"], hidden, hidden),
            attention_norm=self.norm(f"{at}.{names.attention_norm}", hidden),
            up=self._linear([f"{at}.{names.up}"], hidden, inner),
            down=self._linear([f"{at}.{names.down}"], inner, hidden),
            output_norm=self.norm(f"{at}.{names.output_norm}", hidden),
        )

    def heads(self, checkpoint: Checkpoint) -> Heads:
        hidden, labels, head = self._sizes.hidden, checkpoint.num_labels, self._family.head
        if checkpoint.task == "classify":
            return Heads(
                dense=self._read.linear([head.dense], hidden, [hidden]),
                activation=head.activation,
                classifier=self._read.linear([head.output], hidden, [labels]),
            )
        if checkpoint.task == "token_classify":
            return Heads(classifier=self._read.linear(["classifier"], hidden, [labels]))
        return Heads()

    def _linear(self, names: list[str], fan_in: int, fan_out: int) -> Linear:
        names = [f"{self._prefix}{name}" for name in names]
        return self._read.linear(names, fan_in, [fan_out] * len(names))
