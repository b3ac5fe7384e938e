"""ModernBERT over packed tokens: its configuration, its tensors, its forward pass.

Layers with norms before them, rotary positions and gated feed-forward parts; most layers read only near tokens.
Source: Warner et al. 2024, arXiv:2412.13663.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import rotary_table
from varlen.models.blocks.heads import Heads
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.family import (
    Family,
    HeadConfig,
    MaskedLMLayout,
    MaskedLMNames,
    encoder_classes,
)
from varlen.models.checkpoint.files import (
    Json,
    check_multiple,
    read_flag,
    read_int,
)
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm, TokenTable
from varlen.models.checkpoint.rotary_config import (
    LayerKind,
    RotaryConfig,
    read_kinds,
    read_rotary_of_kinds,
)
from varlen.program.rank import AttentionHeads
from varlen_kernels import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

# The theta of each kind of layer: its field in older files, and its default.
_THETAS: Mapping[LayerKind, tuple[str, float]] = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
_POOLINGS: Mapping[str, Literal["cls", "mean"]] = {"cls": "cls", "mean": "mean"}


def _read_heads(config: Json) -> int:
    hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    check_multiple(config, "hidden_size", "num_attention_heads")
    if hidden // heads % 2:
        raise CheckpointError(
            f"heads have {hidden // heads} features; allowed: even numbers, for rotary positions"
        )
    return heads


def _read_kinds(config: Json) -> tuple[LayerKind, ...]:
    every = read_int(config, "global_attn_every_n_layers", default=3)
    return read_kinds(config, lambda number: number % every == 0)


@dataclass(frozen=True, slots=True)
class ModernBertConfig(declare.ConfigFields):
    """What config.json says of a model.

    Attributes:
        window: tokens of layers with sliding attention read those at a smaller distance.
    """

    heads: int = declare.computed(_read_heads, "num_attention_heads")
    vocabulary: int = declare.size("vocab_size")
    hidden: int = declare.size("hidden_size")
    inner: int = declare.size("intermediate_size")
    kinds: tuple[LayerKind, ...] = declare.computed(
        _read_kinds, "num_hidden_layers", "layer_types", "global_attn_every_n_layers"
    )
    window: int = declare.computed(
        lambda config: read_int(config, "local_attention", default=128) // 2 + 1, "local_attention"
    )
    rotary: Mapping[LayerKind, RotaryConfig] = declare.computed(
        lambda config: read_rotary_of_kinds(config, _THETAS),
        "rope_parameters",
        "global_rope_theta",
        "local_rope_theta",
    )
    positions: int = declare.size("max_position_embeddings")
    activation: Activation = declare.activation("hidden_activation")
    norm_eps: float = declare.epsilon("norm_eps", 1e-5)
    has_norm_bias: bool = declare.flag("norm_bias")
    has_attention_bias: bool = declare.flag("attention_bias")
    has_mlp_bias: bool = declare.flag("mlp_bias")
    classifier_pooling: Literal["cls", "mean"] = declare.choice(
        "classifier_pooling", _POOLINGS, "cls"
    )
    classifier_activation: Activation = declare.activation("classifier_activation")
    has_classifier_bias: bool = declare.flag("classifier_bias")

    def window_of(self, kind: LayerKind) -> int:
        """Return the window of a layer; 0 where it holds every sequence that is served."""
        is_whole = kind == "full_attention" or self.window >= self.positions
        return 0 if is_whole else self.window


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
        cos_sin: `[positions, head features]` fp32 for each kind of layer.
    """

    config: ModernBertConfig
    token_table: TokenTable
    embedding_norm: Norm
    cos_sin: Mapping[LayerKind, Tensor]
    layers: tuple[ModernBertLayer, ...]
    final_norm: Norm
    attention_heads: AttentionHeads
    heads: Heads
    type_vocab_size: int = 1

    def record(self, ops: Recorder) -> Value:
        eps, norm = self.config.norm_eps, self.embedding_norm
        embedded = self.token_table.record(ops, inputs.token_ids(ops))
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
        window = self.config.window_of(layer.kind)
        context = ops.attention_varlen(qkv, inputs.cu_seqlens(ops), heads, window=window)
        return layer.attention_output.record(ops, context)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> ModernBert:
    """Return the ModernBERT of a checkpoint; see `Family`."""
    config = ModernBertConfig.read(fields)
    hidden, head_dim = config.hidden, config.hidden // config.heads
    prefix = "model." if "model.embeddings.tok_embeddings.weight" in read else ""
    table = read.token_table(f"{prefix}embeddings.tok_embeddings.weight", config.vocabulary, hidden)

    def cos_sin(rotary: RotaryConfig) -> Tensor:
        return read.computed(lambda: rotary_table(rotary, head_dim, table.device))

    return ModernBert(
        config=config,
        token_table=table,
        embedding_norm=read.norm(f"{prefix}embeddings.norm", hidden, bias=config.has_norm_bias),
        cos_sin={kind: cos_sin(rotary) for kind, rotary in config.rotary.items()},
        layers=tuple(
            _read_layer(read, config, f"{prefix}layers.{index}", kind, is_first=not index)
            for index, kind in enumerate(config.kinds)
        ),
        final_norm=read.last.norm(f"{prefix}final_norm", hidden, bias=config.has_norm_bias),
        attention_heads=AttentionHeads(config.heads, config.heads, head_dim),
        heads=_read_classifier(read.last, config, head),
    )


def _read_layer(
    read: LayerReader, config: ModernBertConfig, at: str, kind: LayerKind, *, is_first: bool
) -> ModernBertLayer:
    hidden, inner = config.hidden, config.inner

    def norm(name: str) -> Norm:
        return read.norm(f"{at}.{name}", hidden, bias=config.has_norm_bias)

    def linear(name: str, fan_in: int, fan_out: int, *, bias: bool) -> Linear:
        return read.linear([f"{at}.{name}"], fan_in, [fan_out], bias=bias)

    return ModernBertLayer(
        kind=kind,
        # the first layer reads the norm of the embeddings
        attention_norm=None if is_first else norm("attn_norm"),
        qkv=linear("attn.Wqkv", hidden, 3 * hidden, bias=config.has_attention_bias),
        attention_output=linear("attn.Wo", hidden, hidden, bias=config.has_attention_bias),
        mlp_norm=norm("mlp_norm"),
        up=linear("mlp.Wi", hidden, 2 * inner, bias=config.has_mlp_bias),
        down=linear("mlp.Wo", inner, hidden, bias=config.has_mlp_bias),
    )


def _read_classifier(read: LayerReader, config: ModernBertConfig, head: HeadConfig) -> Heads:
    hidden = config.hidden
    if head.task not in ("classify", "token_classify", "question_answer"):
        return Heads()
    return Heads(
        pooling=config.classifier_pooling,
        dense=read.linear(["head.dense"], hidden, [hidden], bias=config.has_classifier_bias),
        activation=config.classifier_activation,
        norm=read.norm("head.norm", hidden, bias=config.has_norm_bias),
        norm_eps=config.norm_eps,
        classifier=read.linear(["classifier"], hidden, [head.num_labels]),
    )


def _masked_lm(config: Json) -> MaskedLMLayout:
    read = ModernBertConfig.read(config)
    return MaskedLMLayout(
        MaskedLMNames("head.dense", "head.norm", "decoder", ("decoder.bias",)),
        read.hidden,
        read.hidden,
        read.vocabulary,
        read.classifier_activation,
        read.norm_eps,
        is_tied=read_flag(config, "tie_word_embeddings", default=True),
        has_dense_bias=read.has_classifier_bias,
        has_norm_bias=read.has_norm_bias,
        has_bias=read_flag(config, "decoder_bias", default=True),
    )


_ARCHITECTURES, _HEADS = encoder_classes("ModernBert")
FAMILY = Family(
    architectures=_ARCHITECTURES,
    heads=_HEADS,
    fields=declare.ENCODER.plus(
        ModernBertConfig.names(),
        # training, the masked-language-model head, and how transformers runs
        "decoder_bias deterministic_flash_attn initializer_cutoff_factor reference_compile"
        " repad_logits_with_grad sparse_pred_ignore_index sparse_prediction tie_word_embeddings layer_norm_eps"
        " position_embedding_type".split(),
        {"is_encoder_decoder": False, "rope_scaling": None},
    ),
    read_sizes=ModernBertConfig.read,
    load=load,
    is_unused=lambda name, _: name.startswith(("head.", "decoder.", "classifier.")),
    tokenizer_class="PreTrainedTokenizerFast",
    masked_lm=_masked_lm,
)
