"""The Gemma family: the layers of Llama with scaled embeddings and windows.

Gemma, Gemma 2 and the text part of Gemma 3 are this decoder with other options. EmbeddingGemma is a Gemma 3 whose
tokens read all of a text.
Source: Gemma Team 2024, arXiv:2403.08295; 2024, arXiv:2408.00118 (norms after both parts, limits of scores); 2025,
arXiv:2503.19786 (norms of queries and keys, two bases of rotary positions). Zhang et al. 2025, arXiv:2504.06225
(T5Gemma, an encoder and a decoder with the layers of Gemma 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import PackedAttention, read_rotary_tables
from varlen.models.blocks.heads import Heads, read_output, read_top, suppress_tokens
from varlen.models.blocks.layer_parts import RmsResidualStream, SourceAttention
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.config_fields import is_unread
from varlen.models.checkpoint.family import CLASSIFIERS, Family, HeadConfig, decoder_classes
from varlen.models.checkpoint.files import (
    ACTIVATIONS,
    Json,
    check_fields,
    is_causal,
    read_choice,
    read_flag,
    read_int,
    read_number,
    show,
)
from varlen.models.checkpoint.layers import LayerReader, Norm, TokenTable
from varlen.models.checkpoint.rotary_config import (
    LayerKind,
    RotaryConfig,
    read_kinds,
    read_rotary,
    read_rotary_of_kinds,
    read_windows,
)
from varlen.models.llama import Llama, LlamaLayer, read_attention, read_gated_mlp, read_heads
from varlen.program.rank import AttentionHeads
from varlen.tasks import Task
from varlen_kernels import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention, CrossAttention
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

_GELU = "gelu_pytorch_tanh"
_HEAD_DIM = 256
_BOTH_WAYS = "use_bidirectional_attention"
_GEMMA3_THETAS: Mapping[LayerKind, tuple[str, float]] = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
# Beginnings of names in files of multimodal models, the longest first, and what they have beside the text part.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_VISION = tuple(
    prefix + name
    for prefix in ("model.", "")
    for name in ("vision_tower.", "multi_modal_projector.")
)


@dataclass(frozen=True, slots=True)
class Options:
    """What a model of the family adds to the common architecture.

    Attributes:
        every: the layer of this number, and each multiple, reads all tokens where config.json does not say it.
        score_cap, logit_cap: limits where config.json does not say them; None is no limit.
    """

    fields: frozenset[str] = frozenset()
    activation_field: str = "hidden_activation"
    every: int = 1
    score_cap: float | None = None
    logit_cap: float | None = None
    has_post_norms: bool = True
    has_head_norms: bool = False
    attention_norms: tuple[str, str] = ("input", "post_attention")


_SCORE_CAP = "attn_logit_softcapping"
_WINDOW_FIELDS = frozenset(
    "final_logit_softcapping layer_types query_pre_attn_scalar sliding_window".split()
)
OPTIONS: Mapping[str, Options] = {
    "gemma": Options(activation_field="hidden_act", has_post_norms=False),
    "gemma2": Options(_WINDOW_FIELDS | {_SCORE_CAP}, every=2, score_cap=50.0, logit_cap=30.0),
    "gemma3_text": Options(
        _WINDOW_FIELDS | {_BOTH_WAYS, "rope_local_base_freq", "sliding_window_pattern"},
        every=6,
        has_head_norms=True,
    ),
    # a part of T5Gemma
    "t5_gemma_module": Options(
        _WINDOW_FIELDS | {_SCORE_CAP},
        every=2,
        score_cap=50.0,
        logit_cap=30.0,
        attention_norms=("pre_self_attn", "post_self_attn"),
    ),
}


def _options(config: Json) -> Options:
    return OPTIONS[config["model_type"]]


def _reads_all(config: Json) -> bool:
    return _BOTH_WAYS in _options(config).fields and read_flag(config, _BOTH_WAYS, default=False)


def _read_kinds(config: Json) -> tuple[LayerKind, ...]:
    options = _options(config)
    every = options.every
    if "sliding_window_pattern" in options.fields:
        every = read_int(config, "sliding_window_pattern", default=every)
    if "layer_types" not in options.fields:
        config = {"num_hidden_layers": config.get("num_hidden_layers")}
    return read_kinds(config, lambda number: (number + 1) % every == 0, lowest=0)


def _read_windows(config: Json) -> tuple[int, ...]:
    positions = read_int(config, "max_position_embeddings")
    return read_windows(config, _read_kinds(config), positions, has_both_sides=_reads_all(config))


def _read_rotary(config: Json) -> tuple[RotaryConfig, ...]:
    kinds = _read_kinds(config)
    if "rope_local_base_freq" not in _options(config).fields:
        return (read_rotary(config),) * len(kinds)
    of_kinds = read_rotary_of_kinds(config, _GEMMA3_THETAS)
    return tuple(of_kinds[kind] for kind in kinds)


def _read_activation(config: Json) -> Activation:
    field = _options(config).activation_field
    if field == "hidden_act" and config.get(field) == "gelu":
        # the first files say so, and mean the tanh form
        return ACTIVATIONS[_GELU]
    return read_choice(config, field, ACTIVATIONS, default=_GELU)


def _read_cap(config: Json, field: str, default: float | None) -> float:
    """Return a limit; 0 for none."""
    if field not in _options(config).fields or config.get(field, default) is None:
        return 0.0
    return read_number(config, field, default=default)


def _read_score_scale(config: Json, heads: AttentionHeads) -> float:
    if "query_pre_attn_scalar" not in _options(config).fields:
        return float(heads.dim**-0.5)
    return float(read_number(config, "query_pre_attn_scalar", default=256.0) ** -0.5)


@dataclass(frozen=True, slots=True)
class GemmaConfig(declare.ConfigFields):
    """What config.json says of a model, and what its family adds.

    Attributes:
        windows: window of each layer: number of last tokens that a token reads; where tokens read later ones too,
            those at a smaller distance. 0 is all.
        score_cap, logit_cap: limits of these scores and of logits; 0 is none.
    """

    heads: AttentionHeads = declare.computed(
        lambda config: read_heads(config, _HEAD_DIM),
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    positions: int = declare.size("max_position_embeddings")
    vocab_size: int = declare.size("vocab_size")
    hidden: int = declare.size("hidden_size")
    inner: int = declare.size("intermediate_size")
    windows: tuple[int, ...] = declare.computed(_read_windows, "num_hidden_layers")
    rotary: tuple[RotaryConfig, ...] = declare.computed(
        _read_rotary, "rope_parameters", "rope_scaling", "rope_theta"
    )
    activation: Activation = declare.computed(_read_activation)
    norm_eps: float = declare.epsilon("rms_norm_eps", 1e-6)
    score_scale: float = declare.computed(
        lambda config: _read_score_scale(config, read_heads(config, _HEAD_DIM))
    )
    score_cap: float = declare.computed(
        lambda config: _read_cap(config, _SCORE_CAP, _options(config).score_cap)
    )
    logit_cap: float = declare.computed(
        lambda config: _read_cap(config, "final_logit_softcapping", _options(config).logit_cap)
    )
    has_attention_bias: bool = declare.flag("attention_bias")
    has_tied_output: bool = declare.flag("tie_word_embeddings", default=True)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> Llama:
    """Return the Gemma, Gemma 2 or Gemma 3 of a checkpoint; see `Family`."""
    config = GemmaConfig.read(fields)
    prefix = next((each for each in _PREFIXES if f"{each}embed_tokens.weight" in read), "")
    model = read_stack(read, fields, prefix)
    if head.logit_score is not None and config.logit_cap:
        raise CheckpointError(
            f"config.json has final_logit_softcapping {config.logit_cap:g}; a score of two logits (the module"
            " LogitScore) is served without it"
        )
    is_part = "language_model.lm_head.weight" in read
    output, heads = read_top(
        read,
        head,
        model.token_table,
        config.hidden,
        is_tied=config.has_tied_output,
        table_name=f"{prefix}embed_tokens.weight",
        output_name="language_model.lm_head" if is_part else "lm_head",
    )
    return replace(model, output=output, heads=heads)


def read_stack(
    read: LayerReader, fields: Json, prefix: str, *, is_for_first_stage: bool = False
) -> Llama:
    """Return the layers of a checkpoint, without an output layer and heads.

    Args:
        fields: config.json, or the part of these layers.
    """
    config, options = GemmaConfig.read(fields), _options(fields)
    table = read.token_table(f"{prefix}embed_tokens.weight", config.vocab_size, config.hidden)
    layers = read.layers(
        len(config.windows),
        lambda reader, index: _read_layer(
            reader, config, options, f"{prefix}layers.{index}", config.windows[index]
        ),
        is_for_first_stage=is_for_first_stage,
    )

    return Llama(
        token_table=table,
        cos_sin=read_rotary_tables(read, config.rotary, config.heads.dim, table),
        layers=layers,
        final_norm=read_norm(read.last, f"{prefix}norm", config.hidden),
        projection=None,
        output=None,
        attention_heads=read.heads(config.heads),
        norm_eps=config.norm_eps,
        heads=Heads(),
        activation=config.activation,
        embedding_scale=read.computed(lambda: _rounded(config.hidden**0.5, table.weight)),
        score_scale=config.score_scale,
        score_cap=config.score_cap,
        logit_cap=config.logit_cap,
    )


def _rounded(number: float, like: Tensor) -> float:
    """Return a number in the dtype of a tensor, as transformers has it."""
    return float(like.new_tensor(number, device="cpu"))


def read_norm(read: LayerReader, name: str, size: int) -> Tensor:
    """Return the weight of a norm, `[size]`, which is saved as the distance from 1."""
    weight = read.tensor(f"{name}.weight", size)
    return read.computed(lambda: weight + 1)


def _read_layer(
    read: LayerReader, config: GemmaConfig, options: Options, name: str, window: int
) -> LlamaLayer:
    hidden, heads, attention = config.hidden, config.heads, f"{name}.self_attn"
    has_bias = config.has_attention_bias
    qkv, output = read_attention(
        read, attention, hidden, heads, bias=has_bias, output_bias=has_bias
    )

    def norm(part: str) -> Tensor:
        return read_norm(read, f"{name}.{part}_layernorm", hidden)

    def head_norm(part: str) -> Tensor:
        return read_norm(read, f"{attention}.{part}_norm", heads.dim)

    return LlamaLayer(
        attention_norm=norm(options.attention_norms[0]),
        qkv=qkv,
        head_norms=(head_norm("q"), head_norm("k")) if options.has_head_norms else None,
        attention_output=output,
        attention_post_norm=norm(options.attention_norms[1]) if options.has_post_norms else None,
        mlp_norm=norm("pre_feedforward" if options.has_post_norms else "post_attention"),
        mlp=read_gated_mlp(read, f"{name}.mlp", (hidden, config.inner)),
        mlp_post_norm=norm("post_feedforward") if options.has_post_norms else None,
        window=window,
    )


# What transformers takes where the text_config of a multimodal file says nothing.
_GEMMA3_DEFAULTS: Json = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
}
_TEXT_CLASSES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3ForSequenceClassification": "Gemma3TextForSequenceClassification",
    "Gemma3Model": "Gemma3TextModel",
}


def text_part(config: Json) -> Json:
    """Return config.json of the text part of a multimodal Gemma 3; images are not served.

    Raises:
        CheckpointError: `text_config` is of another model.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", "gemma3_text") != "gemma3_text":
        raise CheckpointError(
            f'config.json has text_config {show(text)}; allowed: an object with model_type "gemma3_text"'
        )
    of_image = {"text_config", "vision_config", "mm_tokens_per_image", "initializer_range"}
    # transformers reads them in text_config only
    of_text = (
        GemmaConfig.names() | OPTIONS["gemma3_text"].fields | {"hidden_activation", "is_causal"}
    )
    own = {
        name: value
        for name, value in config.items()
        if name not in of_image | of_text and not name.endswith(("_token_index", "_token_id"))
    }
    ends = {} if config.get("eos_token_id") is None else {"eos_token_id": config["eos_token_id"]}
    names = config.get("architectures")
    if isinstance(names, list):
        own["architectures"] = [_TEXT_CLASSES.get(str(name), name) for name in names]
    # of both values of tie_word_embeddings, transformers reads the one of the whole model
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
    return {**_GEMMA3_DEFAULTS, **text, **own, **tied, **ends, "model_type": "gemma3_text"}


def _family(
    model_type: str,
    name: str,
    classifiers: tuple[Task, ...] = CLASSIFIERS,
    base: str | None = None,
) -> Family[Llama]:
    architectures, heads = decoder_classes(name, classifiers, base)
    options = OPTIONS[model_type]
    fixed: dict[str, object] = {} if _BOTH_WAYS in options.fields else {_BOTH_WAYS: False}
    if model_type == "gemma3_text":
        # transformers has the field and ignores it
        fixed[_SCORE_CAP] = None
    other = {"hidden_act", "hidden_activation"} - {options.activation_field}
    return Family(
        architectures=architectures,
        heads=heads,
        fields=declare.DECODER.plus(
            GemmaConfig.names() | options.fields | {options.activation_field},
            # transformers reads one of two names of the activation, and of the pattern the one without "_"
            {*other, "_sliding_window_pattern"},
            fixed,
        ),
        read_sizes=GemmaConfig.read,
        load=load,
        # frequencies, which old releases saved; the table where the output is tied to it; images, which are not served
        is_unused=lambda name, _: (
            name.endswith((".rotary_emb.inv_freq", "lm_head.weight")) or name.startswith(_VISION)
        ),
        tokenizer_class="GemmaTokenizer",
        kind="decoder",
        is_divisible=True,
        is_causal=lambda config: is_causal(config) and not _reads_all(config),
    )


FAMILIES: Mapping[str, Family[Llama]] = {
    "gemma": _family("gemma", "Gemma"),
    "gemma2": _family("gemma2", "Gemma2"),
    "gemma3_text": _family("gemma3_text", "Gemma3", ("classify", "rerank"), "Gemma3Text"),
}


_HEAD = "T5GemmaForConditionalGeneration"
_MODULE = "t5_gemma_module"
# What transformers takes where a part of config.json says nothing.
_DEFAULTS: Json = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
_PART_RULES = declare.DECODER.plus(
    GemmaConfig.names() | OPTIONS[_MODULE].fields | {"hidden_activation"},
    ("dropout_rate", "hidden_act"),
    {"use_bidirectional_attention": False},
)


def _part(config: Json, name: str) -> Json:
    """Return the configuration of the encoder or of the decoder.

    Raises:
        CheckpointError: it is missing, of another model, or has a field that is not served.
    """
    given = config.get(name)
    if not isinstance(given, dict) or given.get("model_type", _MODULE) != _MODULE:
        raise CheckpointError(
            f'config.json has {name} {show(given)}; allowed: an object with model_type "{_MODULE}"'
        )
    known = [key for key in given if _PART_RULES.know(key) or is_unread(key, "t5gemma")]
    check_fields(given, f"{name} of config.json", known=known, fixed=_PART_RULES.fixed)
    # transformers ignores what a part says of it: the encoder reads both ways, the decoder does not
    return {**_DEFAULTS, **given, "model_type": _MODULE, "is_causal": name == "decoder"}


def _read_parts(config: Json) -> tuple[GemmaConfig, GemmaConfig]:
    encoder, decoder = (GemmaConfig.read(_part(config, name)) for name in ("encoder", "decoder"))
    if config.get("vocab_size", decoder.vocab_size) != decoder.vocab_size:
        raise CheckpointError(
            f"config.json has vocab_size {show(config['vocab_size'])} and its decoder {decoder.vocab_size}; make them"
            " agree"
        )
    return encoder, decoder


@dataclass(frozen=True, slots=True)
class T5GemmaConfig(declare.ConfigFields):
    """What config.json says of a model."""

    parts: tuple[GemmaConfig, GemmaConfig] = declare.computed(
        _read_parts, "encoder", "decoder", "vocab_size"
    )
    hidden: int = declare.computed(lambda config: _read_parts(config)[1].hidden)
    positions: int = declare.computed(
        lambda config: min(part.positions for part in _read_parts(config))
    )
    has_tied_output: bool = declare.flag("tie_word_embeddings", default=True)


@dataclass(frozen=True, slots=True)
class Source:
    """Attention of a decoder's layer to a source, and the norm `[hidden]` behind it."""

    attention: SourceAttention
    post_norm: Tensor


@dataclass(frozen=True, slots=True)
class T5Gemma:
    """A T5Gemma in one dtype."""

    encoder: Llama
    decoder: Llama
    sources: tuple[Source, ...]

    @property
    def layers(self) -> tuple[LlamaLayer, ...]:
        return self.decoder.layers

    @property
    def attention_heads(self) -> AttentionHeads:
        return self.decoder.attention_heads

    @property
    def token_table(self) -> TokenTable:
        return self.decoder.token_table

    def record_encoder(self, ops: Recorder, cross: CrossAttention) -> None:
        hidden = self.encoder.record(ops, PackedAttention(is_causal=False))
        for number, source in enumerate(self.sources):
            kv = source.attention.kv.record(ops, hidden)
            cross.store(ops, number, kv, self.attention_heads)

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        decoder, eps = self.decoder, self.decoder.norm_eps
        norms = chain.from_iterable(
            (Norm(layer.attention_norm, None), source.attention.norm, Norm(layer.mlp_norm, None))
            for layer, source in zip(decoder.layers, self.sources, strict=True)
        )
        embedded = decoder.token_table.record(
            ops, inputs.token_ids(ops), scale=decoder.embedding_scale
        )
        stream = RmsResidualStream(
            ops, embedded, chain(norms, [Norm(decoder.final_norm, None)]), eps=eps
        )

        def add(y: Value, post_norm: Tensor | None) -> None:
            assert post_norm is not None
            stream.add(ops.rms_norm(y, post_norm, eps=eps))

        for number, (layer, source) in enumerate(zip(decoder.layers, self.sources, strict=True)):
            attended = decoder.record_attention(ops, attention, number, stream.x)
            add(attended, layer.attention_post_norm)
            add(self._record_source(ops, cross, number, stream.x), source.post_norm)
            add(decoder.record_mlp(ops, number, stream.x), layer.mlp_post_norm)
        return stream.x

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        return self.decoder.record_logits(ops, hidden)

    def _record_source(self, ops: Recorder, cross: CrossAttention, number: int, x: Value) -> Value:
        source = self.sources[number].attention
        context = cross.attend(
            ops,
            number,
            source.query.record(ops, x),
            self.attention_heads,
            scale=self.decoder.score_scale,
            soft_cap=self.decoder.score_cap,
        )
        return source.output.record(ops, context)


def load_t5gemma(read: LayerReader, fields: Json, head: HeadConfig) -> T5Gemma:
    """Return the T5Gemma of a checkpoint; see `Family`."""
    config = T5GemmaConfig.read(fields)
    encoder, decoder = config.parts
    prefix = "model.decoder."
    encoder_model = read_stack(
        read, _part(fields, "encoder"), "model.encoder.", is_for_first_stage=True
    )
    decoder_model = read_stack(read, _part(fields, "decoder"), prefix)
    sources = read.layers(
        len(decoder.windows),
        lambda reader, index: _read_source(
            reader, decoder, encoder.hidden, f"{prefix}layers.{index}"
        ),
    )
    output = read_output(
        read,
        decoder_model.token_table,
        decoder.vocab_size,
        decoder.hidden,
        is_tied=config.has_tied_output,
        name="lm_head.out_proj",
    )
    first = read.rank.bounds(decoder.vocab_size)[0]
    output = read.computed(lambda: suppress_tokens(output, head.masked_tokens, first))
    return T5Gemma(encoder_model, replace(decoder_model, output=output), sources)


def _read_source(read: LayerReader, config: GemmaConfig, encoder_hidden: int, name: str) -> Source:
    heads, has_bias, attention = config.heads, config.has_attention_bias, f"{name}.cross_attn"
    key_width = heads.keys * heads.dim
    norm, post_norm = (
        read_norm(read, f"{name}.{part}_cross_attn_layernorm", config.hidden)
        for part in ("pre", "post")
    )
    source = SourceAttention(
        norm=Norm(norm, None),
        query=read.linear(
            [f"{attention}.q_proj"],
            config.hidden,
            [heads.width],
            bias=has_bias,
            split="outputs",
            units=[heads.queries],
        ),
        kv=read.linear(
            [f"{attention}.k_proj", f"{attention}.v_proj"],
            encoder_hidden,
            [key_width, key_width],
            bias=has_bias,
            split="outputs",
            units=[heads.keys, heads.keys],
        ),
        output=read.linear(
            [f"{attention}.o_proj"], heads.width, [config.hidden], bias=has_bias, split="inputs"
        ),
    )
    return Source(source, post_norm)


ENCODER_DECODERS: Mapping[str, Family[T5Gemma]] = {
    "t5gemma": Family(
        architectures={_HEAD: "translate"},
        heads={"translate": _HEAD},
        fields=declare.ENCODER_DECODER.plus(T5GemmaConfig.names()),
        read_sizes=T5GemmaConfig.read,
        load=load_t5gemma,
        # frequencies, which old releases saved; the table where the output is tied to it
        is_unused=lambda name, _: name.endswith(
            (".rotary_emb.inv_freq", "lm_head.out_proj.weight")
        ),
        tokenizer_class="GemmaTokenizer",
        kind="encoder_decoder",
    )
}
