"""How the families of post-norm encoders name their tensors, and the fields of config.json.

Source of the names: the models as Hugging Face transformers saves them.
"""

from dataclasses import dataclass
from typing import Literal

from varlen.models.blocks.heads import HeadActivation


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of fields in config.json, empty for one that is absent; and defaults."""

    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    types: str = "type_vocab_size"
    embedding: str = ""
    activation: str = "hidden_act"
    norm_eps: str = "layer_norm_eps"
    default_activation: str = "gelu"
    default_norm_eps: float = 1e-12

    def all(self) -> frozenset[str]:
        """Return the fields that are read."""
        names = {self.hidden, self.inner, self.layers, self.heads, self.types, self.embedding}
        names = {*names, self.activation, self.norm_eps} - {""}
        return frozenset(names | {"max_position_embeddings", "vocab_size"})


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of the tensors of a layer, below the layer's own name.

    Attributes:
        name: name of the layer, with a place for its number unless all share one.
        qkv: queries, keys and values, or one linear layer of all.
        up: layer in front of the activation: one linear layer; or a gate, whose activation multiplies the second one.
        gate: the half of the one layer of `up` that is a gate for the other half; None if that layer holds no gate.
        without_bias: the linear layers that have none.
        query_norm, key_norm: norms over the queries of all heads, and over the keys; empty without them.
        second_norm: norm of the sum of the attention's output and its input again; empty without it.
    """

    name: str = "encoder.layer.{}"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    gate: Literal["first", "second"] | None = None
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"
    without_bias: tuple[str, ...] = ()
    query_norm: str = ""
    key_norm: str = ""
    second_norm: str = ""

    @property
    def is_gated(self) -> bool:
        return self.gate is not None or len(self.up) > 1

    def has_bias(self, name: str) -> bool:
        return name not in self.without_bias


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors of experts, below the layer's own name, and of fields.

    Attributes:
        up, down: tensors of all experts of a layer, each with a row for every feature between the two layers.
        bias: the vector that is added to the sum of a token's experts.
        number: the field with the experts of a layer.
        count: the field with the experts of a token.
        every: the field that says which layers have experts: one of as many, from the second layer on.
    """

    router: str
    up: str
    down: str
    bias: str
    number: str
    count: str
    every: str

    @property
    def fields(self) -> tuple[str, ...]:
        return self.number, self.count, self.every


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The classifier of sequences: a dense layer of the first token, then an output layer."""

    dense: str = "classifier.dense"
    output: str = "classifier.out_proj"
    activation: HeadActivation = "tanh"
