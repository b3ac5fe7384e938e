"""The Llama family: rotary positions, grouped heads, gated feed-forward parts, RMS norms.

Llama, Mistral, Qwen2 and Qwen3 are this decoder with other options, and encoders where `is_causal` is false. Relatives
with files of their own change what `load` returns.
Source: Touvron et al. 2023, arXiv:2302.13971; Jiang et al. 2023, arXiv:2310.06825 (windows); Yang et al. 2024,
arXiv:2407.10671 (biases); Yang et al. 2025, arXiv:2505.09388 (norms of queries and keys).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import RotaryPositions, read_rotary_tables
from varlen.models.blocks.heads import Heads, read_top, record_output
from varlen.models.blocks.layer_parts import Experts, FeedForward
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.family import CLASSIFIERS, Family, HeadConfig, decoder_classes
from varlen.models.checkpoint.files import (
    Json,
    check_multiple,
    is_causal,
    read_choice,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
    read_number,
    show,
)
from varlen.models.checkpoint.layers import LayerReader, Linear, TokenTable
from varlen.models.checkpoint.rotary_config import RotaryConfig, read_rotary
from varlen.program.rank import AttentionHeads
from varlen.tasks import Task
from varlen_kernels import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

_WINDOW_FIELDS = frozenset(
    "layer_types max_window_layers sliding_window use_sliding_window".split()
)


@dataclass(frozen=True, slots=True)
class Options:
    """What a model of the family adds to the common architecture.

    Attributes:
        fields: fields of config.json that it reads beside the common ones.
        has_qkv_bias: whether queries, keys and values always have a bias.
        head_dim: features of a head where config.json does not say them; None derives them.
        window: last tokens that a token reads where config.json does not say it; None is all.
        norm_eps: added to the mean square of norms where config.json does not say it.
        theta: base of rotary positions where config.json does not say it.
        are_head_norms_last: whether these norms follow rotary positions.
        is_fused: whether a file has one matrix for queries, keys and values, and one for gates and what they multiply.
        has_partial_rotary: whether config.json may let some features of a head rotate.
    """

    fields: frozenset[str] = frozenset()
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    head_dim: int | None = None
    window: int | None = None
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    are_head_norms_last: bool = False
    is_fused: bool = False
    has_partial_rotary: bool = False


_BIASES = frozenset({"attention_bias", "mlp_bias"})
_PARTIAL_ROTARY = frozenset({"original_max_position_embeddings", "partial_rotary_factor"})
# Fields that only `first_releases` sets.
_OF_FIRST_RELEASES = frozenset(
    {"pair_prefixes", "projection_size", "score_temperature", "sequence_pooling"}
)
OPTIONS: Mapping[str, Options] = {
    "llama": Options(_BIASES),
    "eurobert": Options(_BIASES | {"classifier_pooling"}, norm_eps=1e-5),
    "mistral": Options(frozenset({"sliding_window"}), window=4096),
    "qwen2": Options(_WINDOW_FIELDS, has_qkv_bias=True, window=4096),
    "qwen3": Options(
        _WINDOW_FIELDS | {"attention_bias"}, has_head_norms=True, head_dim=128, window=4096
    ),
    "qwen3_moe": Options(
        frozenset({"attention_bias", "sliding_window", "use_sliding_window"}),
        has_head_norms=True,
        window=4096,
    ),
    "granite": Options(_BIASES),
    "smollm3": Options(
        _BIASES | {"layer_types", "sliding_window", "use_sliding_window"}, theta=2_000_000.0
    ),
    "phi3": Options(
        _PARTIAL_ROTARY | {"sliding_window"},
        norm_eps=1e-5,
        is_fused=True,
        has_partial_rotary=True,
    ),
    "hunyuan_v1_dense": Options(
        frozenset({"attention_bias"}),
        has_head_norms=True,
        norm_eps=1e-5,
        head_norm_names=("query_layernorm", "key_layernorm"),
        are_head_norms_last=True,
    ),
}
_POOLINGS: Mapping[str, Literal["cls", "mean", "last"]] = {
    "avg": "mean",
    "cls": "cls",
    "last": "last",
}


def _options(config: Json) -> Options:
    return OPTIONS[config["model_type"]]


def _read_pooling(config: Json) -> Literal["cls", "mean", "last"] | None:
    if config.get("sequence_pooling") is None:
        return None
    return read_choice(config, "sequence_pooling", _POOLINGS, default="avg")


def _read_flag(config: Json, name: str) -> bool:
    is_read = name in _options(config).fields
    return is_read and read_flag(config, name, default=False)


def _read_heads(config: Json) -> AttentionHeads:
    return read_heads(config, _options(config).head_dim)


def read_heads(config: Json, default_dim: int | None) -> AttentionHeads:
    """Return the heads of a layer with rotary positions.

    Args:
        default_dim: features of a head where config.json does not say them; None derives them.

    Raises:
        CheckpointError: the sizes do not fit each other.
    """
    queries = read_int(config, "num_attention_heads")
    # absent in the first Llama models, which have as many key heads as query heads
    has_keys = config.get("num_key_value_heads") is not None
    keys = read_int(config, "num_key_value_heads") if has_keys else queries
    if queries % keys:
        raise CheckpointError(
            f"num_attention_heads {queries} is not a multiple of num_key_value_heads {keys}"
        )
    if config.get("head_dim") is not None:
        dim = read_int(config, "head_dim")
    elif default_dim is not None:
        dim = default_dim
    else:
        check_multiple(config, "hidden_size", "num_attention_heads")
        dim = config["hidden_size"] // queries
    if dim % 2:
        raise CheckpointError(
            f"heads have {dim} features; allowed: even numbers, for rotary positions"
        )
    return AttentionHeads(queries, keys, dim)


def _read_rotary(config: Json) -> RotaryConfig:
    options = _options(config)
    return read_rotary(
        config,
        default_theta=options.theta,
        dim=_read_heads(config).dim,
        is_partial=options.has_partial_rotary,
    )


def _read_windows(config: Json) -> tuple[int, ...]:
    options, positions = _options(config), _read_rotary(config).positions
    layers = read_layers(config, "num_hidden_layers", lowest=0)
    window = _read_window(config, options)
    if window is not None and not is_causal(config):
        # the masks of transformers then include the distance itself
        window += 1
    size = 0 if window is None or window >= positions else window
    if "layer_types" not in options.fields:
        return (size,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = read_int(config, "max_window_layers", default=28, lowest=0)
        return tuple(size if index >= first else 0 for index in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(f"config.json has layer_types {show(kinds)}; allowed: {layers} names")
    sizes = {"full_attention": 0} | ({} if window is None else {"sliding_attention": size})
    unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in sizes]
    if unknown:
        raise CheckpointError(
            f"config.json has {show(unknown[0])} in layer_types; allowed: {', '.join(sizes)}"
            f"{'' if window else ' (without a sliding_window that is used)'}"
        )
    return tuple(sizes[kind] for kind in kinds)


def _read_window(config: Json, options: Options) -> int | None:
    if "sliding_window" not in options.fields:
        return None
    is_switch_known = "use_sliding_window" in options.fields
    if is_switch_known and not read_flag(config, "use_sliding_window", default=False):
        return None
    window = config.get("sliding_window", options.window)
    return None if window is None else read_int({"sliding_window": window}, "sliding_window")


@dataclass(frozen=True, slots=True)
class LlamaConfig(declare.ConfigFields):
    """What config.json says of a model, and what its family adds.

    Attributes:
        width: features of a token in the layers.
        hidden: features of a token behind the projection, or `width` without one.
        windows: window of each layer: number of last tokens that a token reads; 0 is all.
    """

    heads: AttentionHeads = declare.computed(
        _read_heads, "num_attention_heads", "num_key_value_heads", "head_dim"
    )
    rotary: RotaryConfig = declare.computed(
        _read_rotary, "max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta"
    )
    positions: int = declare.computed(lambda config: _read_rotary(config).positions)
    vocab_size: int = declare.size("vocab_size")
    width: int = declare.size("hidden_size")
    hidden: int = declare.computed(
        lambda config: read_int(
            config, "hidden_size" if config.get("projection_size") is None else "projection_size"
        )
    )
    inner: int = declare.size("intermediate_size")
    windows: tuple[int, ...] = declare.computed(_read_windows, "num_hidden_layers")
    norm_eps: float = declare.computed(
        lambda config: read_norm_eps(config, "rms_norm_eps", default=_options(config).norm_eps),
        "rms_norm_eps",
    )
    has_qkv_bias: bool = declare.computed(
        lambda config: _options(config).has_qkv_bias or _read_flag(config, "attention_bias")
    )
    has_output_bias: bool = declare.computed(lambda config: _read_flag(config, "attention_bias"))
    has_mlp_bias: bool = declare.computed(lambda config: _read_flag(config, "mlp_bias"))
    has_head_norms: bool = declare.computed(lambda config: _options(config).has_head_norms)
    has_tied_output: bool = declare.flag("tie_word_embeddings")
    score_pooling: Literal["cls", "mean", "last"] = declare.computed(
        lambda config: _read_pooling(config) or "last"
    )
    temperature: float = declare.computed(
        lambda config: read_number(config, "score_temperature", default=1.0)
    )


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One transformer layer.

    Attributes:
        attention_norm, mlp_norm: `[hidden]`, weights of the norms before the two parts.
        attention_post_norm, mlp_post_norm: `[hidden]`, weights of the norms of their results, if these are normed.
        head_norms: `[head_dim]` of queries and of keys, if they are normed.
    """

    attention_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    attention_output: Linear
    mlp_norm: Tensor
    mlp: FeedForward | Experts
    window: int
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Llama:
    """A decoder of the Llama family in one dtype.

    Attributes:
        cos_sin: `[positions, head_dim]` fp32 of each layer, see `varlen_kernels.reference.rotary`; None for a layer
            without positions.
        output: `[hidden, vocabulary]`; None where the checkpoint has no output layer.
        score_scale: factor of the scores of attention; None is head_dim ** -0.5.
        score_cap, logit_cap: limits of the scores of attention and of logits, see `tanh`; 0 is none.
    """

    token_table: TokenTable
    cos_sin: tuple[Tensor | None, ...]
    layers: tuple[LlamaLayer, ...]
    final_norm: Tensor
    projection: Linear | None
    output: Linear | None
    attention_heads: AttentionHeads
    norm_eps: float
    heads: Heads
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float = 0.0
    logit_cap: float = 0.0
    are_head_norms_last: bool = False

    def record(self, ops: Recorder, attention: Attention) -> Value:
        eps = self.norm_eps
        residual = self.token_table.record(ops, inputs.token_ids(ops), scale=self.embedding_scale)
        # the norm before each layer, and the final one
        norms = [*(layer.attention_norm for layer in self.layers), self.final_norm]
        x = ops.rms_norm(residual, norms[0], eps=eps)
        for number, layer in enumerate(self.layers):
            attended = self.record_attention(ops, attention, number, x)
            if layer.attention_post_norm is not None:
                attended = ops.rms_norm(attended, layer.attention_post_norm, eps=eps)
            residual, x = ops.residual_rms_norm(attended, residual, layer.mlp_norm, eps=eps)
            x = self.record_mlp(ops, number, x)
            if layer.mlp_post_norm is not None:
                x = ops.rms_norm(x, layer.mlp_post_norm, eps=eps)
            residual, x = ops.residual_rms_norm(x, residual, norms[number + 1], eps=eps)
        return x if self.projection is None else self.projection.record(ops, x)

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        logits = record_output(ops, self.output, hidden, self.token_table.vocab_size)
        return ops.tanh(logits, limit=self.logit_cap) if self.logit_cap else logits

    def record_attention(self, ops: Recorder, attention: Attention, number: int, x: Value) -> Value:
        """Record the attention of a layer, given its normed input, and return its output, `[tokens, hidden]`."""
        layer, heads, cos_sin = self.layers[number], self.attention_heads, self.cos_sin[number]
        qkv = layer.qkv.record(ops, x)
        context = attention.record(
            ops,
            number,
            qkv,
            heads,
            positions=None
            if cos_sin is None
            else RotaryPositions(
                cos_sin, layer.head_norms, self.norm_eps, self.are_head_norms_last
            ),
            scale=self.score_scale,
            window=layer.window,
            soft_cap=self.score_cap,
        )
        return layer.attention_output.record(ops, context)

    def record_mlp(self, ops: Recorder, number: int, x: Value) -> Value:
        """Record the feed-forward part of a layer, given its normed input, and return its output."""
        return self.layers[number].mlp.record(ops, x, self.activation)


# Returns the feed-forward part of a layer, given its reader, the name of the part and the number of the layer.
ReadMlp: TypeAlias = Callable[[LayerReader, str, int], FeedForward | Experts]


def load(
    read: LayerReader, fields: Json, head: HeadConfig, read_mlp: ReadMlp | None = None
) -> Llama:
    """Return the Llama, or the relative in `OPTIONS`, of a checkpoint; see `Family`."""
    config = LlamaConfig.read(fields)
    shape, attention_heads = (config.vocab_size, config.width), read.heads(config.heads)
    prefix = "model." if "model.embed_tokens.weight" in read else ""
    table_name = f"{prefix}embed_tokens.weight"
    table = read.token_table(table_name, *shape)
    options = _options(fields)
    gated_mlp = partial(
        read_gated_mlp,
        sizes=(config.width, config.inner),
        bias=config.has_mlp_bias,
        is_fused=options.is_fused,
    )
    mlp_of = read_mlp or (lambda reader, name, _: gated_mlp(reader, name))

    def read_layer(reader: LayerReader, index: int) -> LlamaLayer:
        name = f"{prefix}layers.{index}"
        return _read_layer(
            reader,
            config,
            options,
            name,
            config.windows[index],
            mlp_of(reader, f"{name}.mlp", index),
        )

    layers = read.layers(len(config.windows), read_layer)
    final_norm = read.last.tensor(f"{prefix}norm.weight", config.width)
    projection = None
    if fields.get("projection_size") is not None:
        projection = read.last.linear(["linear"], config.width, [config.hidden], bias=False)
    output, heads = read_top(
        read,
        head,
        table,
        config.width,
        is_tied=config.has_tied_output,
        table_name=table_name,
        pooling=config.score_pooling,
        temperature=config.temperature,
    )
    return Llama(
        token_table=table,
        cos_sin=read_rotary_tables(read, (config.rotary,) * len(layers), config.heads.dim, table),
        layers=layers,
        final_norm=final_norm,
        projection=projection,
        output=output,
        attention_heads=attention_heads,
        norm_eps=config.norm_eps,
        heads=heads,
        are_head_norms_last=options.are_head_norms_last,
    )


def read_gated_mlp(
    read: LayerReader,
    name: str,
    sizes: tuple[int, int],
    *,
    bias: bool = False,
    is_fused: bool = False,
) -> FeedForward:
    """Return the feed-forward part of this name.

    Args:
        sizes: features of a token, and between the two linear layers.
    """
    hidden, inner = sizes
    # ranks cannot divide a matrix of both
    up = ["gate_up_proj"] if is_fused else ["gate_proj", "up_proj"]
    return FeedForward(
        read.linear(
            [f"{name}.{part}" for part in up],
            hidden,
            [2 * inner // len(up)] * len(up),
            bias=bias,
            split="outputs",
        ),
        read.linear([f"{name}.down_proj"], inner, [hidden], bias=bias, split="inputs"),
    )


def _read_layer(
    read: LayerReader,
    config: LlamaConfig,
    options: Options,
    name: str,
    window: int,
    mlp: FeedForward | Experts,
) -> LlamaLayer:
    hidden, heads = config.width, config.heads
    attention = f"{name}.self_attn"

    def head_norm(part: str) -> Tensor:
        return read.tensor(f"{attention}.{part}.weight", heads.dim)

    first, last = options.head_norm_names
    qkv, output = read_attention(
        read,
        attention,
        hidden,
        heads,
        bias=config.has_qkv_bias,
        output_bias=config.has_output_bias,
        is_fused=options.is_fused,
    )
    return LlamaLayer(
        attention_norm=read.tensor(f"{name}.input_layernorm.weight", hidden),
        qkv=qkv,
        head_norms=(head_norm(first), head_norm(last)) if config.has_head_norms else None,
        attention_output=output,
        mlp_norm=read.tensor(f"{name}.post_attention_layernorm.weight", hidden),
        mlp=mlp,
        window=window,
    )


def read_attention(
    read: LayerReader,
    name: str,
    hidden: int,
    heads: AttentionHeads,
    *,
    bias: bool,
    output_bias: bool,
    is_fused: bool = False,
) -> tuple[Linear, Linear]:
    """Return the layers of queries, keys and values, and of the attention's output."""
    key_width = heads.keys * heads.dim
    parts, widths = ["q_proj", "k_proj", "v_proj"], [heads.width, key_width, key_width]
    units = [heads.queries, heads.keys, heads.keys]
    if is_fused:
        # ranks cannot divide it
        parts, widths, units = ["qkv_proj"], [sum(widths)], [sum(units)]
    names = [f"{name}.{part}" for part in parts]
    qkv = read.linear(names, hidden, widths, bias=bias, split="outputs", units=units)
    output = [f"{name}.o_proj"]
    return qkv, read.linear(output, heads.width, [hidden], bias=output_bias, split="inputs")


def make_family(
    name: str,
    model_type: str,
    tokenizer_class: str,
    *,
    read_sizes: Callable[[Json], LlamaConfig] = LlamaConfig.read,
    load: Callable[[LayerReader, Json, HeadConfig], Llama] = load,
    fields: Collection[str] = (),
    classifiers: tuple[Task, ...] = CLASSIFIERS,
) -> Family[Llama]:
    """Return the family of a relative.

    Args:
        model_type: its name in `OPTIONS`.
        fields: more fields of config.json than `LlamaConfig` and its options have, which it reads.
    """
    architectures, heads = decoder_classes(name, classifiers)
    options = OPTIONS[model_type]
    read = LlamaConfig.names() | options.fields | {*fields}
    fixed = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
    return Family(
        architectures=architectures,
        heads=heads,
        fields=declare.DECODER.plus(
            read | _OF_FIRST_RELEASES,
            # another order of the same sums
            ("pretraining_tp",),
            {key: value for key, value in fixed.items() if key not in read},
        ),
        read_sizes=read_sizes,
        load=load,
        # frequencies, which old releases saved; a copy of the table where the output is tied to it
        is_unused=lambda name, _: name.endswith(".rotary_emb.inv_freq") or name == "lm_head.weight",
        tokenizer_class=tokenizer_class,
        kind="decoder",
        is_divisible=not options.is_fused,
        read_pooling=_read_pooling,
    )


FAMILIES: Mapping[str, Family[Llama]] = {
    "llama": make_family("Llama", "llama", "LlamaTokenizer"),
    "mistral": make_family("Mistral", "mistral", "LlamaTokenizer"),
    "qwen2": make_family("Qwen2", "qwen2", "Qwen2Tokenizer"),
    "qwen3": make_family("Qwen3", "qwen3", "Qwen2Tokenizer"),
}
