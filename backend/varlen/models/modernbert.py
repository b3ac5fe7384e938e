"""The forward pass of ModernBERT over packed tokens.

Layers with norms before them, rotary positions and gated feed-forward parts; most layers read only near tokens.
Source: Warner et al. 2024, arXiv:2412.13663.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.models.blocks import inputs
from varlen.models.blocks.heads import Heads, head_dtype
from varlen.models.blocks.rotary import rotary_table
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.modernbert_checkpoint import LayerKind, ModernBertConfig, prefix_of
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder


@dataclass(frozen=True, slots=True)
class ModernBertLayer:
    """One layer; `up` holds a gate, then the values that its activation multiplies."""

    kind: LayerKind
    attention_norm: Norm | None
    qkv: Linear
    attention_output: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModernBert:
    """A ModernBERT in one dtype.

    Attributes:
        config: of its checkpoint.
        token_table: `[vocabulary, hidden]`.
        cos_sin: `[positions, head features]` fp32 for each kind of layer.
        heads: the layers on top of it.
    """

    config: ModernBertConfig
    token_table: Tensor
    embedding_norm: Norm
    cos_sin: Mapping[LayerKind, Tensor]
    layers: tuple[ModernBertLayer, ...]
    final_norm: Norm
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
        eps, norm = self.config.norm_eps, self.embedding_norm
        embedded = ops.embed(inputs.token_ids(ops), self.token_table)
        x = residual = ops.layer_norm(embedded, norm.weight, norm.bias, eps=eps)
        norms = [each for layer in self.layers for each in (layer.attention_norm, layer.mlp_norm)]
        # the first layer has no norm of its own, and one follows the last
        following = iter([*norms[1:], self.final_norm])

        def add(y: Value) -> tuple[Value, Value]:
            after = next(following)
            assert after is not None
            return ops.residual_layer_norm(y, residual, after.weight, after.bias, eps=eps)

        for layer in self.layers:
            residual, x = add(self._record_attention(ops, layer, x))
            inner = ops.activate_gate(layer.up.record(ops, x), kind=self.config.activation)
            residual, x = add(layer.down.record(ops, inner))
        return x

    def _record_attention(self, ops: Recorder, layer: ModernBertLayer, x: Value) -> Value:
        heads = self.attention_heads
        qkv = ops.rotary(
            layer.qkv.record(ops, x), inputs.position_ids(ops), self.cos_sin[layer.kind], heads
        )
        context = ops.attention_varlen(
            qkv,
            inputs.cu_seqlens(ops),
            heads,
            scale=heads.dim**-0.5,
            window=self.config.window_of(layer.kind),
        )
        return layer.attention_output.record(ops, context)


def load_modernbert(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> ModernBert:
    """Return the ModernBERT of a checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = ModernBertConfig.read(checkpoint.config)
    hidden, head_dim = config.hidden, config.hidden // config.heads
    with CheckpointWeights(checkpoint.folder) as weights:
        read, prefix = LayerReader(weights, dtype, device), prefix_of(weights)
        table = f"{prefix}embeddings.tok_embeddings.weight"
        read_last = LayerReader(weights, head_dtype(checkpoint, dtype), device)
        return ModernBert(
            config=config,
            token_table=read.tensor(table, config.vocabulary, hidden),
            embedding_norm=_norm(read, config, f"{prefix}embeddings.norm"),
            cos_sin={
                kind: rotary_table(rotary, head_dim, device)
                for kind, rotary in config.rotary.items()
            },
            layers=tuple(
                _read_layer(read, config, f"{prefix}layers.{index}", kind, is_first=not index)
                for index, kind in enumerate(config.kinds)
            ),
            final_norm=_norm(read_last, config, f"{prefix}final_norm"),
            attention_heads=AttentionHeads(config.heads, config.heads, head_dim),
            heads=_read_heads(read_last, config, checkpoint),
        )


def _read_layer(
    read: LayerReader, config: ModernBertConfig, name: str, kind: LayerKind, *, is_first: bool
) -> ModernBertLayer:
    hidden, inner = config.hidden, config.inner

    def attention(part: str, fan_out: int) -> Linear:
        has_bias = config.has_attention_bias
        return read.linear([f"{name}.attn.{part}"], hidden, [fan_out], bias=has_bias)

    return ModernBertLayer(
        kind=kind,
        attention_norm=None if is_first else _norm(read, config, f"{name}.attn_norm"),
        qkv=attention("Wqkv", 3 * hidden),
        attention_output=attention("Wo", hidden),
        mlp_norm=_norm(read, config, f"{name}.mlp_norm"),
        up=read.linear([f"{name}.mlp.Wi"], hidden, [2 * inner], bias=config.has_mlp_bias),
        down=read.linear([f"{name}.mlp.Wo"], inner, [hidden], bias=config.has_mlp_bias),
    )


def _read_heads(read: LayerReader, config: ModernBertConfig, checkpoint: Checkpoint) -> Heads:
    hidden = config.hidden
    if not checkpoint.num_labels:
        return Heads()
    return Heads(
        pooling=config.classifier_pooling,
        dense=read.linear(["head.dense"], hidden, [hidden], bias=config.has_classifier_bias),
        activation=config.classifier_activation,
        norm=_norm(read, config, "head.norm"),
        norm_eps=config.norm_eps,
        classifier=read.linear(["classifier"], hidden, [checkpoint.num_labels]),
    )


def _norm(read: LayerReader, config: ModernBertConfig, name: str) -> Norm:
    return read.norm(name, config.hidden, bias=config.has_norm_bias)
