"""Checkpoint families: the names and layouts that each gives its tensors, mapped to one form of weights.

Linear weights become `[in, out]`, contiguous (see `varlen_kernels.reference.linear`); query, key
and value become one matrix.
Source of the names: BERT as saved by Hugging Face transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.errors import CheckpointError
from varlen.models.checkpoint import Checkpoint, Json, read_int
from varlen.models.weights import CheckpointWeights
from varlen_kernels import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Affine:
    """A linear layer's `weight` `[in, out]` and `bias` `[out]`, or a norm's, `[hidden]` both."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer."""

    qkv: Affine
    attention_output: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    output_norm: Affine


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """An encoder in one dtype, whatever family it came from.

    Attributes:
        token_table, position_table, type_table: `[rows, hidden]`.
        pooler: the dense layer before a classifier, where the checkpoint has one.
        classifier: the head, where the checkpoint has one.
    """

    token_table: Tensor
    position_table: Tensor
    type_table: Tensor
    embedding_norm: Affine
    layers: tuple[LayerWeights, ...]
    num_heads: int
    activation: Activation
    norm_eps: float
    pooler: Affine | None
    classifier: Affine | None


def load_encoder(checkpoint: Checkpoint, dtype: torch.dtype) -> EncoderWeights:
    """Return the weights of a BERT checkpoint in `dtype`.

    Raises:
        CheckpointError: a tensor is missing or misshapen, or the configuration asks for a variant that is not served.
    """
    config = checkpoint.config
    _check_variant(config)
    hidden, inner = checkpoint.hidden_size, read_int(config, "intermediate_size")
    with CheckpointWeights(checkpoint.folder) as weights:
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in weights else ""

        def table(name: str, rows: int) -> Tensor:
            return weights.read(f"{prefix}embeddings.{name}.weight", rows, hidden).to(dtype)

        def norm(name: str) -> Affine:
            read = [weights.read(f"{prefix}{name}.{part}", hidden) for part in ("weight", "bias")]
            return Affine(*(tensor.to(dtype) for tensor in read))

        def linear(name: str, fan_in: int, fan_out: int) -> Affine:
            return _join(weights, [name], fan_in, fan_out, dtype)

        def layer(index: int) -> LayerWeights:
            at = f"{prefix}encoder.layer.{index}"
            parts = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
            return LayerWeights(
                qkv=_join(weights, parts, hidden, hidden, dtype),
                attention_output=linear(f"{at}.attention.output.dense", hidden, hidden),
                attention_norm=norm(f"{at[len(prefix) :]}.attention.output.LayerNorm"),
                up=linear(f"{at}.intermediate.dense", hidden, inner),
                down=linear(f"{at}.output.dense", inner, hidden),
                output_norm=norm(f"{at[len(prefix) :]}.output.LayerNorm"),
            )

        return EncoderWeights(
            token_table=table("word_embeddings", read_int(config, "vocab_size")),
            position_table=table("position_embeddings", checkpoint.position_limit),
            type_table=table("token_type_embeddings", int(config.get("type_vocab_size", 2))),
            embedding_norm=norm("embeddings.LayerNorm"),
            layers=tuple(layer(i) for i in range(read_int(config, "num_hidden_layers", lowest=0))),
            num_heads=read_int(config, "num_attention_heads"),
            activation=_ACTIVATIONS[config.get("hidden_act", "gelu")],
            norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            pooler=_when(
                f"{prefix}pooler.dense.weight" in weights,
                lambda: linear(f"{prefix}pooler.dense", hidden, hidden),
            ),
            classifier=_when(
                checkpoint.num_labels > 0,
                lambda: linear("classifier", hidden, checkpoint.num_labels),
            ),
        )


def _join(
    weights: CheckpointWeights, names: list[str], fan_in: int, fan_out: int, dtype: torch.dtype
) -> Affine:
    """Return linear layers that read one input as one layer, their outputs side by side."""
    matrices = [weights.read(f"{name}.weight", fan_out, fan_in) for name in names]
    biases = [weights.read(f"{name}.bias", fan_out) for name in names]
    joined = torch.cat([matrix.to(dtype).t() for matrix in matrices], dim=1)
    return Affine(joined.contiguous(), torch.cat(biases).to(dtype))


def _when(condition: bool, make: Callable[[], Affine]) -> Affine | None:
    return make() if condition else None


def _check_variant(config: Json) -> None:
    position = config.get("position_embedding_type", "absolute")
    if position != "absolute":
        raise CheckpointError(f'position_embedding_type is "{position}"; allowed: absolute')
    if config.get("is_decoder"):
        raise CheckpointError("is_decoder is true; this version serves encoders")
    activation = config.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(f'hidden_act is "{activation}"; allowed: {", ".join(_ACTIVATIONS)}')
    heads, hidden = read_int(config, "num_attention_heads"), int(config["hidden_size"])
    if hidden % heads:
        raise CheckpointError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
