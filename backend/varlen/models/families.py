"""Checkpoint families: the names and layouts that each gives its tensors, mapped to one form of weights.

Linear weights become `[in, out]`, contiguous (see `varlen_kernels.reference.linear`); query, key
and value become one matrix.
Source of the names: BERT as saved by Hugging Face transformers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.models.bert_checkpoint import activation_of, norm_eps_of, prefix_of
from varlen.models.checkpoint import Checkpoint
from varlen.models.config_file import read_int
from varlen.models.weights import CheckpointWeights
from varlen_kernels import Activation


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


def load_encoder(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> EncoderWeights:
    """Return the weights of a BERT checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = checkpoint.config
    hidden, inner = checkpoint.hidden_size, read_int(config, "intermediate_size")
    with CheckpointWeights(checkpoint.folder) as weights:
        read = _Bert(weights, hidden, dtype, device)
        return EncoderWeights(
            token_table=read.table("word", read_int(config, "vocab_size")),
            position_table=read.table("position", checkpoint.position_limit),
            type_table=read.table("token_type", read_int(config, "type_vocab_size")),
            embedding_norm=read.norm("embeddings"),
            layers=tuple(
                read.layer(f"encoder.layer.{index}", inner)
                for index in range(read_int(config, "num_hidden_layers", lowest=0))
            ),
            num_heads=read_int(config, "num_attention_heads"),
            activation=activation_of(config),
            norm_eps=norm_eps_of(config),
            pooler=read.linear(["pooler.dense"], hidden, hidden) if read.has_pooler else None,
            classifier=read.classifier(checkpoint.num_labels) if checkpoint.num_labels else None,
        )


class _Bert:
    """Reads the parts of a BERT by their names in a checkpoint."""

    def __init__(
        self, weights: CheckpointWeights, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights = weights
        self._hidden = hidden
        self._dtype = dtype
        self._device = device
        # models with a head keep the encoder under a name of its own
        self._prefix = prefix_of(weights)

    @property
    def has_pooler(self) -> bool:
        return f"{self._prefix}pooler.dense.weight" in self._weights

    def table(self, name: str, rows: int) -> Tensor:
        name = f"{self._prefix}embeddings.{name}_embeddings.weight"
        return self._copy(name, rows, self._hidden)

    def norm(self, of: str) -> Affine:
        name = f"{self._prefix}{of}.LayerNorm"
        return Affine(*(self._copy(f"{name}.{part}", self._hidden) for part in ("weight", "bias")))

    def linear(self, names: list[str], fan_in: int, fan_out: int) -> Affine:
        """Return linear layers that read one input as one layer, their outputs side by side."""
        return self._join([f"{self._prefix}{name}" for name in names], fan_in, fan_out)

    def classifier(self, num_labels: int) -> Affine:
        return self._join(["classifier"], self._hidden, num_labels)

    def layer(self, at: str, inner: int) -> LayerWeights:
        hidden = self._hidden
        qkv = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
        return LayerWeights(
            qkv=self.linear(qkv, hidden, hidden),
            attention_output=self.linear([f"{at}.attention.output.dense"], hidden, hidden),
            attention_norm=self.norm(f"{at}.attention.output"),
            up=self.linear([f"{at}.intermediate.dense"], hidden, inner),
            down=self.linear([f"{at}.output.dense"], inner, hidden),
            output_norm=self.norm(f"{at}.output"),
        )

    def _join(self, names: list[str], fan_in: int, fan_out: int) -> Affine:
        matrices = [self._read(f"{name}.weight", fan_out, fan_in).t() for name in names]
        biases = [self._read(f"{name}.bias", fan_out) for name in names]
        return Affine(torch.cat(matrices, dim=1).contiguous(), torch.cat(biases))

    def _copy(self, name: str, *shape: int) -> Tensor:
        # a view would keep the whole file mapped, and be read page by page while requests wait
        return self._read(name, *shape).clone()

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._weights.read(name, *shape).to(device=self._device, dtype=self._dtype)
