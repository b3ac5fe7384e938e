"""OLMo 2 and OLMo 3: layers whose results are normed, not their inputs.

Norms of queries and keys are over all heads. OLMo 3 has windows in three of four layers, and rotary positions
of its own for each kind of layer.
Source: OLMo Team 2024, arXiv:2501.00656; 2025, arXiv:2512.13961 (OLMo 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.models.blocks.feed_forward import FeedForward
from varlen.models.blocks.output import read_top, record_output
from varlen.models.blocks.rotary import RotaryPositions, read_rotary_tables
from varlen.models.checkpoint import declared_fields as declare
from varlen.models.checkpoint import kind_fields
from varlen.models.checkpoint.config_file import Json, read_layers
from varlen.models.checkpoint.family import Family, HeadConfig, decoder_classes
from varlen.models.checkpoint.layers import LayerReader, Linear, TokenTable
from varlen.models.checkpoint.rotary_config import (
    LayerKind,
    RotaryConfig,
    read_kinds,
    read_rotary,
    read_rotary_of_kinds,
    read_windows,
)
from varlen.models.llama import read_gated_mlp, read_heads
from varlen.program.heads import AttentionHeads

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention
    from varlen.models.blocks.heads import Heads
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

_WINDOW_FIELDS = frozenset({"layer_types", "sliding_window"})
# Layers of OLMo 3, by their number from 1, that read all tokens where config.json does not say it.
_EVERY = 4
_THETAS: Mapping[LayerKind, tuple[str, float]] = {
    "full_attention": ("rope_theta", 500_000.0),
    "sliding_attention": ("rope_theta", 500_000.0),
}


def _has_windows(config: Json) -> bool:
    return bool(config["model_type"] == "olmo3")


def _read_kinds(config: Json) -> tuple[LayerKind, ...]:
    if _has_windows(config):
        return read_kinds(config, lambda number: (number + 1) % _EVERY == 0)
    full: LayerKind = "full_attention"
    return (full,) * read_layers(config, "num_hidden_layers")


def _read_windows(config: Json) -> tuple[int, ...]:
    return read_windows(config, _read_kinds(config), _read_positions(config))


def _read_rotary(config: Json) -> tuple[RotaryConfig, ...]:
    kinds = _read_kinds(config)
    if not _has_windows(config):
        return (read_rotary(config),) * len(kinds)
    of_kinds = read_rotary_of_kinds(config, _THETAS)
    return tuple(of_kinds[kind] for kind in kinds)


def _read_positions(config: Json) -> int:
    return min(rotary.positions for rotary in _read_rotary(config))


@dataclass(frozen=True, slots=True)
class OlmoConfig(declare.ConfigFields):
    """What config.json says of a model."""

    heads: AttentionHeads = declare.computed(
        lambda config: read_heads(config, None),
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    rotary: tuple[RotaryConfig, ...] = declare.computed(
        _read_rotary, "max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta"
    )
    positions: int = declare.computed(_read_positions)
    vocab_size: int = declare.size("vocab_size")
    hidden: int = declare.size("hidden_size")
    inner: int = declare.size("intermediate_size")
    windows: tuple[int, ...] = declare.computed(_read_windows, "num_hidden_layers")
    norm_eps: float = declare.epsilon("rms_norm_eps", 1e-5)
    has_attention_bias: bool = declare.flag("attention_bias")
    has_tied_output: bool = declare.flag("tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class OlmoLayer:
    """One transformer layer.

    Attributes:
        query_norm, key_norm: weights of the norms of all queries and of all keys of a token.
        attention_norm, mlp_norm: `[hidden]`, weights of the norms of the results of both parts.
    """

    query: Linear
    key: Linear
    value: Linear
    query_norm: Tensor
    key_norm: Tensor
    attention_output: Linear
    attention_norm: Tensor
    mlp: FeedForward
    mlp_norm: Tensor
    window: int


@dataclass(frozen=True, slots=True)
class Olmo:
    """An OLMo 2 or OLMo 3 in one dtype.

    Attributes:
        cos_sin: `[positions, head_dim]` fp32 of each layer, see `varlen_kernels.reference.rotary`.
        output: `[hidden, vocabulary]`; None where the checkpoint has no output layer.
    """

    token_table: TokenTable
    cos_sin: tuple[Tensor, ...]
    layers: tuple[OlmoLayer, ...]
    final_norm: Tensor
    output: Linear | None
    attention_heads: AttentionHeads
    norm_eps: float
    heads: Heads

    def record(self, ops: Recorder, attention: Attention) -> Value:
        eps = self.norm_eps
        x = self.token_table.record(ops, inputs.token_ids(ops))
        for number, layer in enumerate(self.layers):
            attended = self._record_attention(ops, attention, number, x)
            x = ops.record("add", ops.rms_norm(attended, layer.attention_norm, eps=eps), x)
            y = ops.rms_norm(layer.mlp.record(ops, x, "silu"), layer.mlp_norm, eps=eps)
            x = ops.record("add", y, x)
        return ops.rms_norm(x, self.final_norm, eps=eps)

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        return record_output(ops, self.output, hidden, self.token_table.vocab_size)

    def _record_attention(
        self, ops: Recorder, attention: Attention, number: int, x: Value
    ) -> Value:
        layer, eps = self.layers[number], self.norm_eps
        queries = ops.rms_norm(layer.query.record(ops, x), layer.query_norm, eps=eps)
        keys = ops.rms_norm(layer.key.record(ops, x), layer.key_norm, eps=eps)
        qkv = ops.concat(ops.concat(queries, keys), layer.value.record(ops, x))
        context = attention.record(
            ops,
            number,
            qkv,
            self.attention_heads,
            positions=RotaryPositions(self.cos_sin[number], None, eps),
            window=layer.window,
        )
        return layer.attention_output.record(ops, context)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> Olmo:
    """Return the OLMo 2 or OLMo 3 of a checkpoint; see `Family`."""
    config = OlmoConfig.read(fields)
    prefix = "model." if "model.embed_tokens.weight" in read else ""
    table_name = f"{prefix}embed_tokens.weight"
    table = read.token_table(table_name, config.vocab_size, config.hidden)
    layers = read.layers(
        len(config.windows),
        lambda reader, index: _read_layer(
            reader, config, f"{prefix}layers.{index}", config.windows[index]
        ),
    )
    final_norm = read.last.tensor(f"{prefix}norm.weight", config.hidden)
    output, heads = read_top(
        read,
        head,
        table,
        config.hidden,
        is_tied=config.has_tied_output,
        table_name=table_name,
    )
    return Olmo(
        token_table=table,
        cos_sin=read_rotary_tables(read, config.rotary, config.heads.dim, table),
        layers=layers,
        final_norm=final_norm,
        output=output,
        attention_heads=config.heads,
        norm_eps=config.norm_eps,
        heads=heads,
    )


def _read_layer(read: LayerReader, config: OlmoConfig, name: str, window: int) -> OlmoLayer:
    hidden, heads, attention = config.hidden, config.heads, f"{name}.self_attn"
    key_width, has_bias = heads.keys * heads.dim, config.has_attention_bias

    def part(letter: str, width: int) -> Linear:
        return read.linear([f"{attention}.{letter}_proj"], hidden, [width], bias=has_bias)

    return OlmoLayer(
        query=part("q", heads.width),
        key=part("k", key_width),
        value=part("v", key_width),
        query_norm=read.tensor(f"{attention}.q_norm.weight", heads.width),
        key_norm=read.tensor(f"{attention}.k_norm.weight", key_width),
        attention_output=read.linear([f"{attention}.o_proj"], heads.width, [hidden], bias=has_bias),
        attention_norm=read.tensor(f"{name}.post_attention_layernorm.weight", hidden),
        mlp=read_gated_mlp(read, f"{name}.mlp", (hidden, config.inner)),
        mlp_norm=read.tensor(f"{name}.post_feedforward_layernorm.weight", hidden),
        window=window,
    )


def _family(name: str) -> Family[Olmo]:
    architectures, heads = decoder_classes(name, ("classify", "rerank"))
    own = _WINDOW_FIELDS if name == "Olmo3" else frozenset[str]()
    return Family(
        architectures=architectures,
        heads=heads,
        fields=kind_fields.DECODER.plus(
            OlmoConfig.names() | own,
            # another order of the same sums
            ("pretraining_tp",),
            {"hidden_act": "silu", "partial_rotary_factor": 1.0},
        ),
        read_sizes=OlmoConfig.read,
        load=load,
        # frequencies, which old releases saved; a copy of the table where the output is tied to it
        is_unused=lambda name, _: name.endswith(".rotary_emb.inv_freq") or name == "lm_head.weight",
        tokenizer_class="GPT2Tokenizer",
        kind="decoder",
    )


FAMILIES: Mapping[str, Family[Olmo]] = {"olmo2": _family("Olmo2"), "olmo3": _family("Olmo3")}
