"""The forward pass of DeBERTa-v2 and -v3 over packed tokens.

Post-norm layers whose scores have products with distances ("disentangled attention"): of a query with the key of its
distance to a token, and of the token's key with the query of that distance. Keys and queries of distances are
projections of learned embeddings, so they are computed when the model is loaded.
Source: He et al. 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from varlen.models.blocks import inputs
from varlen.models.blocks.heads import Heads, head_dtype
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.deberta_checkpoint import DebertaConfig, DistanceTerm, prefix_of
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder
from varlen_kernels.reference.attention import Distances


@dataclass(frozen=True, slots=True)
class DebertaLayer:
    """One layer; queries, keys and values are side by side."""

    qkv: Linear
    distances: Distances | None
    attention_output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class Deberta:
    """A DeBERTa in one dtype.

    Attributes:
        config: of its checkpoint.
        token_table, position_table: `[rows, features]`.
        projection: from the features of the tables to those of the layers, if there is one.
        heads: the layers on top of it.
    """

    config: DebertaConfig
    token_table: Tensor
    position_table: Tensor | None
    projection: Linear | None
    embedding_norm: Norm
    layers: tuple[DebertaLayer, ...]
    attention_heads: AttentionHeads
    heads: Heads

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        return self.token_table.shape[0]

    @property
    def type_vocab_size(self) -> int:
        """Token types below this are valid: it has one."""
        return 1

    def record(self, ops: Recorder) -> Value:
        """Record the encoder and return its last hidden state, `[tokens, hidden]`."""
        positions = None if self.position_table is None else inputs.position_ids(ops)
        x = ops.embed(inputs.token_ids(ops), self.token_table, positions, self.position_table)
        if self.projection is not None:
            x = self.projection.record(ops, x)
        norm = self.embedding_norm
        x = ops.layer_norm(x, norm.weight, norm.bias, eps=self.config.norm_eps)
        for layer in self.layers:
            x = self._record_layer(ops, layer, x)
        return x

    def _record_layer(self, ops: Recorder, layer: DebertaLayer, x: Value) -> Value:
        context = ops.attention_varlen(
            layer.qkv.record(ops, x),
            inputs.cu_seqlens(ops),
            self.attention_heads,
            distances=layer.distances,
            scale=self.config.scale,
        )
        x = self._add_norm(
            ops, layer.attention_output.record(ops, context), x, layer.attention_norm
        )
        inner = layer.up.record_activated(ops, x, self.config.activation)
        return self._add_norm(ops, layer.down.record(ops, inner), x, layer.output_norm)

    def _add_norm(self, ops: Recorder, x: Value, residual: Value, norm: Norm) -> Value:
        return ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=self.config.norm_eps)


def load_deberta(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Deberta:
    """Return the DeBERTa of a checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = DebertaConfig.read(checkpoint.config)
    with CheckpointWeights(checkpoint.folder) as weights:
        return _Reader(checkpoint, config, weights, dtype, device).model()


def distance_rows(config: DebertaConfig) -> Tensor:
    """Return the row of each distance in a table of distances, `[2 * positions - 1]` int32.

    Entry positions - 1 + d is that of a key d tokens after its query.
    """
    # row 0 is that of the furthest key after a query
    before = -torch.arange(1 - config.positions, config.positions)
    if config.buckets:
        middle = config.buckets // 2
        # in fp32, as transformers: rounding decides the bucket of distance max_distance - 1
        whole = torch.log(torch.tensor((config.max_distance - 1) / middle))
        part = torch.log((before.abs() / middle).clamp_min(1)) / whole
        bucket = (torch.ceil(part * (middle - 1)) + middle).long() * before.sign()
        before = torch.where(before.abs() <= middle, before, bucket)
    return (before + config.span).clamp(0, 2 * config.span - 1).int()


class _Reader:
    """Reads the parts of a DeBERTa by their names in a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DebertaConfig,
        weights: CheckpointWeights,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._prefix = prefix_of(weights)
        self._dtype = dtype
        self._read = LayerReader(weights, dtype, device)
        # products of weights are rounded once
        self._exact = LayerReader(weights, torch.float32, device)
        self._last = LayerReader(weights, head_dtype(checkpoint, dtype), device)

    def model(self) -> Deberta:
        config = self._config
        hidden, embedding = config.hidden, config.embedding
        embeddings = self._distance_embeddings()
        rows = None if embeddings is None else distance_rows(config).to(embeddings.device)

        def table(name: str, rows: int) -> Tensor:
            name = f"{self._prefix}embeddings.{name}_embeddings.weight"
            return self._read.tensor(name, rows, embedding)

        def layer(index: int) -> DebertaLayer:
            at = f"{self._prefix}encoder.layer.{index}"
            distances = None
            if embeddings is not None and rows is not None:
                distances = self._distances(f"{at}.attention.self", embeddings, rows)
            return self._layer(at, distances, is_last=index == config.layers - 1)

        projection = f"{self._prefix}embeddings.embed_proj"
        return Deberta(
            config=config,
            token_table=table("word", config.vocabulary),
            position_table=table("position", config.positions)
            if config.has_position_table
            else None,
            projection=self._read.linear([projection], embedding, [hidden], bias=False)
            if embedding != hidden
            else None,
            embedding_norm=self._norm(f"{self._prefix}embeddings.LayerNorm"),
            layers=tuple(layer(index) for index in range(config.layers)),
            attention_heads=AttentionHeads(config.heads, config.heads, hidden // config.heads),
            heads=self._heads(),
        )

    def _layer(self, at: str, distances: Distances | None, *, is_last: bool) -> DebertaLayer:
        hidden, inner = self._config.hidden, self._config.inner
        qkv = [f"{at}.attention.self.{name}_proj" for name in ("query", "key", "value")]
        return DebertaLayer(
            qkv=self._read.linear(qkv, hidden, [hidden] * 3),
            distances=distances,
            attention_output=self._read.linear([f"{at}.attention.output.dense"], hidden, [hidden]),
            attention_norm=self._norm(f"{at}.attention.output.LayerNorm"),
            up=self._read.linear([f"{at}.intermediate.dense"], hidden, [inner]),
            down=self._read.linear([f"{at}.output.dense"], inner, [hidden]),
            output_norm=(self._last if is_last else self._read).norm(
                f"{at}.output.LayerNorm", hidden
            ),
        )

    def _distance_embeddings(self) -> Tensor | None:
        """Return the embeddings of distances, `[2 * span, hidden]` fp32, None if no score reads them."""
        config = self._config
        if not config.terms:
            return None
        name = f"{self._prefix}encoder.rel_embeddings.weight"
        embeddings = self._exact.tensor(name, 2 * config.span, config.hidden)
        if not config.has_distance_norm:
            return embeddings
        norm = self._exact.norm(f"{self._prefix}encoder.LayerNorm", config.hidden)
        return F.layer_norm(embeddings, (config.hidden,), norm.weight, norm.bias, config.norm_eps)

    def _distances(self, at: str, embeddings: Tensor, rows: Tensor) -> Distances:
        """Return the keys and queries of distances in one layer."""
        hidden = self._config.hidden

        def table(term: DistanceTerm) -> Tensor | None:
            if term not in self._config.terms:
                return None
            name = f"{at}.{self._config.projection_of(term)}"
            projection = self._exact.linear([name], hidden, [hidden])
            return F.linear(embeddings, projection.weight.t(), projection.bias).to(self._dtype)

        return Distances(rows, keys=table("c2p"), queries=table("p2c"))

    def _heads(self) -> Heads:
        hidden, labels = self._config.hidden, self._checkpoint.num_labels
        if not labels:
            return Heads()
        classifier = self._last.linear(["classifier"], hidden, [labels])
        if self._checkpoint.head_task == "token_classify":
            return Heads(classifier=classifier)
        return Heads(
            dense=self._last.linear(["pooler.dense"], hidden, [hidden]),
            activation=self._config.classifier_activation,
            classifier=classifier,
        )

    def _norm(self, name: str) -> Norm:
        return self._read.norm(name, self._config.hidden)
