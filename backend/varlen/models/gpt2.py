"""GPT-2: a decoder with learned positions and pre-norm layers, over packed tokens.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.models.blocks.heads import Heads, read_output, record_output
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.family import Family, HeadConfig
from varlen.models.checkpoint.files import Json, check_multiple, read_int
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm, TokenTable
from varlen.program.rank import AttentionHeads
from varlen_kernels import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder


def _read_heads(config: Json) -> int:
    read_int(config, "n_embd")
    heads = read_int(config, "n_head")
    check_multiple(config, "n_embd", "n_head")
    return heads


def _read_inner(config: Json) -> int:
    has_inner = config.get("n_inner") is not None
    return read_int(config, "n_inner") if has_inner else 4 * read_int(config, "n_embd")


@dataclass(frozen=True, slots=True)
class Gpt2Config(declare.ConfigFields):
    """What config.json says of a model."""

    num_heads: int = declare.computed(_read_heads, "n_head")
    vocab_size: int = declare.size("vocab_size")
    positions: int = declare.size("n_positions")
    hidden: int = declare.size("n_embd")
    inner: int = declare.computed(_read_inner, "n_inner")
    num_layers: int = declare.layers("n_layer", lowest=0)
    activation: Activation = declare.activation("activation_function", "gelu_new")
    norm_eps: float = declare.epsilon("layer_norm_epsilon", 1e-5)
    has_tied_output: bool = declare.flag("tie_word_embeddings", default=True)


@dataclass(frozen=True, slots=True)
class Gpt2Layer:
    """One transformer layer; query, key and value are one matrix, side by side."""

    attention_norm: Norm
    qkv: Linear
    attention_output: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Gpt2:
    """A GPT-2 in one dtype.

    Attributes:
        position_table: `[positions, hidden]`.
        output: `[hidden, vocabulary]`; None where the checkpoint has no output layer.
    """

    token_table: TokenTable
    position_table: Tensor
    layers: tuple[Gpt2Layer, ...]
    final_norm: Norm
    output: Linear | None
    attention_heads: AttentionHeads
    activation: Activation
    norm_eps: float
    heads: Heads = Heads()

    def record(self, ops: Recorder, attention: Attention) -> Value:
        residual = self.token_table.record(
            ops, inputs.token_ids(ops), inputs.position_ids(ops), self.position_table
        )
        norms = [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        norms.append(self.final_norm)
        x = ops.layer_norm(residual, norms[0].weight, norms[0].bias, eps=self.norm_eps)
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv.record(ops, x)
            context = attention.record(ops, number, qkv, self.attention_heads)
            attended = layer.attention_output.record(ops, context)
            residual, x = self._add_norm(ops, attended, residual, layer.mlp_norm)
            inner = layer.up.record_activated(ops, x, self.activation)
            x = layer.down.record(ops, inner)
            residual, x = self._add_norm(ops, x, residual, norms[2 * number + 2])
        return x

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        return record_output(ops, self.output, hidden, self.token_table.vocab_size)

    def _add_norm(
        self, ops: Recorder, x: Value, residual: Value, norm: Norm
    ) -> tuple[Value, Value]:
        return ops.residual_layer_norm(x, residual, norm.weight, norm.bias, eps=self.norm_eps)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> Gpt2:
    """Return the GPT-2 of a checkpoint; see `Family`."""
    config = Gpt2Config.read(fields)
    prefix = "transformer." if "transformer.wte.weight" in read else ""
    vocabulary, hidden, num_heads = config.vocab_size, config.hidden, config.num_heads
    heads = read.heads(AttentionHeads(num_heads, num_heads, hidden // num_heads))
    table = read.token_table(f"{prefix}wte.weight", vocabulary, hidden)
    return Gpt2(
        token_table=table,
        position_table=read.tensor(f"{prefix}wpe.weight", config.positions, hidden),
        layers=read.layers(
            config.num_layers,
            lambda reader, index: _read_layer(reader, config, f"{prefix}h.{index}"),
        ),
        final_norm=read.last.norm(f"{prefix}ln_f", hidden),
        output=(
            read_output(read, table, vocabulary, hidden, is_tied=config.has_tied_output)
            if head.architecture == "GPT2LMHeadModel"
            else None
        ),
        attention_heads=heads,
        activation=config.activation,
        norm_eps=config.norm_eps,
    )


def _read_layer(read: LayerReader, config: Gpt2Config, name: str) -> Gpt2Layer:
    hidden, inner = config.hidden, config.inner
    # unlike in other families, weights are saved as [in, out]
    linear = partial(read.linear, is_saved_by_input=True)
    return Gpt2Layer(
        attention_norm=read.norm(f"{name}.ln_1", hidden),
        qkv=linear(
            [f"{name}.attn.c_attn"],
            hidden,
            [3 * hidden],
            split="outputs",
            units=[config.num_heads],
            parts=3,
        ),
        attention_output=linear([f"{name}.attn.c_proj"], hidden, [hidden], split="inputs"),
        mlp_norm=read.norm(f"{name}.ln_2", hidden),
        up=linear([f"{name}.mlp.c_fc"], hidden, [inner], split="outputs"),
        down=linear([f"{name}.mlp.c_proj"], inner, [hidden], split="inputs"),
    )


FAMILY = Family(
    architectures={"GPT2LMHeadModel": "generate", "GPT2Model": "embed"},
    heads={"generate": "GPT2LMHeadModel"},
    fields=declare.DECODER.plus(
        Gpt2Config.names(),
        # a head for several choices; another order of the same operations
        "summary_activation summary_proj_to_labels summary_type summary_use_proj"
        " reorder_and_upcast_attn".split(),
        {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
    ),
    read_sizes=Gpt2Config.read,
    load=load,
    # the causal mask of old releases; a copy of the table where the output is tied to it
    is_unused=lambda name, _: (
        name.endswith((".attn.bias", ".attn.masked_bias")) or name == "lm_head.weight"
    ),
    tokenizer_class="GPT2Tokenizer",
    kind="decoder",
    is_divisible=True,
)
