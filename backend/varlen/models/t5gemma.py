"""T5Gemma: an encoder and a decoder with the layers of Gemma 2.

Source: Zhang et al. 2025, arXiv:2504.06225.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError
from varlen.models import gemma
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import PackedAttention
from varlen.models.blocks.output import read_output, suppress_tokens
from varlen.models.blocks.residual import RmsResidualStream
from varlen.models.blocks.seq2seq_layers import SourceAttention
from varlen.models.checkpoint import declared_fields as declare
from varlen.models.checkpoint import kind_fields
from varlen.models.checkpoint.config_fields import is_unread
from varlen.models.checkpoint.config_file import Json, check_fields, read_flag, show
from varlen.models.checkpoint.family import Family, HeadConfig
from varlen.models.checkpoint.layers import LayerReader, Norm, TokenTable
from varlen.models.llama import Llama, LlamaLayer
from varlen.program.heads import AttentionHeads

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention, CrossAttention
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

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
_PART_RULES = kind_fields.DECODER.plus(
    gemma.GemmaConfig.names() | gemma.OPTIONS[_MODULE].fields | {"hidden_activation"},
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


def _read_parts(config: Json) -> tuple[gemma.GemmaConfig, gemma.GemmaConfig]:
    encoder, decoder = (
        gemma.GemmaConfig.read(_part(config, name)) for name in ("encoder", "decoder")
    )
    if config.get("vocab_size", decoder.vocab_size) != decoder.vocab_size:
        raise CheckpointError(
            f"config.json has vocab_size {show(config['vocab_size'])} and its decoder {decoder.vocab_size}; make them"
            " agree"
        )
    return encoder, decoder


@dataclass(frozen=True, slots=True)
class T5GemmaConfig(declare.ConfigFields):
    """What config.json says of a model."""

    parts: tuple[gemma.GemmaConfig, gemma.GemmaConfig] = declare.computed(
        _read_parts, "encoder", "decoder", "vocab_size"
    )
    hidden: int = declare.computed(lambda config: _read_parts(config)[1].hidden)
    positions: int = declare.computed(
        lambda config: min(part.positions for part in _read_parts(config))
    )
    has_tied_output: bool = declare.computed(
        lambda config: read_flag(config, "tie_word_embeddings", default=True),
        "tie_word_embeddings",
    )


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
        source, scale = self.sources[number].attention, self.decoder.score_scale
        assert scale is not None
        context = cross.attend(
            ops,
            number,
            source.query.record(ops, x),
            self.attention_heads,
            scale=scale,
            soft_cap=self.decoder.score_cap,
        )
        return source.output.record(ops, context)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> T5Gemma:
    """Return the T5Gemma of a checkpoint; see `Family`."""
    config = T5GemmaConfig.read(fields)
    encoder, decoder = config.parts
    prefix = "model.decoder."
    encoder_model = gemma.read_stack(
        read, _part(fields, "encoder"), "model.encoder.", is_for_first_stage=True
    )
    decoder_model = gemma.read_stack(read, _part(fields, "decoder"), prefix)
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


def _read_source(
    read: LayerReader, config: gemma.GemmaConfig, encoder_hidden: int, name: str
) -> Source:
    heads, has_bias, attention = config.heads, config.has_attention_bias, f"{name}.cross_attn"
    key_width = heads.keys * heads.dim
    norm, post_norm = (
        gemma.read_norm(read, f"{name}.{part}_cross_attn_layernorm", config.hidden)
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


FAMILIES: Mapping[str, Family[T5Gemma]] = {
    "t5gemma": Family(
        architectures={_HEAD: "translate"},
        heads={"translate": _HEAD},
        fields=kind_fields.ENCODER_DECODER.plus(T5GemmaConfig.names()),
        read_sizes=T5GemmaConfig.read,
        load=load,
        # frequencies, which old releases saved; the table where the output is tied to it
        is_unused=lambda name, _: name.endswith(
            (".rotary_emb.inv_freq", "lm_head.out_proj.weight")
        ),
        tokenizer_class="GemmaTokenizer",
        kind="encoder_decoder",
    )
}
