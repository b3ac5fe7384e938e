"""GPT-2: a decoder with learned positions and pre-norm layers, over packed tokens.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; tensor names as Hugging Face
transformers saves them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.models.blocks import inputs
from varlen.models.blocks.attention import Attention
from varlen.models.blocks.output import read_output, record_output
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.gpt2_checkpoint import Gpt2Config, prefix_of
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder
from varlen_kernels import Activation


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
        token_table, position_table: `[rows, hidden]`.
        output: `[hidden, vocabulary]`; None where the checkpoint has no output layer.
    """

    token_table: Tensor
    position_table: Tensor
    layers: tuple[Gpt2Layer, ...]
    final_norm: Norm
    output: Linear | None
    attention_heads: AttentionHeads
    activation: Activation
    norm_eps: float

    @property
    def num_layers(self) -> int:
        """Number of its attention layers."""
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        return self.token_table.shape[0]

    def record(self, ops: Recorder, attention: Attention) -> Value:
        """Record the decoder and return its last hidden state after the final norm, `[tokens, hidden]`."""
        residual = ops.embed(
            inputs.token_ids(ops), self.token_table, inputs.position_ids(ops), self.position_table
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
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""
        # Checkpoint.check_task has refused checkpoints without this layer
        assert self.output is not None
        return record_output(ops, self.output, hidden)

    def _add_norm(
        self, ops: Recorder, x: Value, residual: Value, norm: Norm
    ) -> tuple[Value, Value]:
        return ops.residual_layer_norm(x, residual, norm.weight, norm.bias, eps=self.norm_eps)


def load_gpt2(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, norm_dtype: torch.dtype
) -> Gpt2:
    """Return the GPT-2 of a checkpoint in `dtype` on `device`.

    Args:
        checkpoint, dtype, device: the model's folder, and the dtype and device of its weights.
        norm_dtype: dtype of the final norm, and so of the last hidden state.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = Gpt2Config.read(checkpoint.config)
    with CheckpointWeights(checkpoint.folder) as weights:
        read, prefix = LayerReader(weights, dtype, device), prefix_of(weights)
        table = read.tensor(f"{prefix}wte.weight", config.vocab_size, config.hidden)
        return Gpt2(
            token_table=table,
            position_table=read.tensor(f"{prefix}wpe.weight", config.positions, config.hidden),
            layers=tuple(
                _read_layer(read, config, f"{prefix}h.{index}")
                for index in range(config.num_layers)
            ),
            final_norm=LayerReader(weights, norm_dtype, device).norm(
                f"{prefix}ln_f", config.hidden
            ),
            output=(
                read_output(read, table, is_tied=config.has_tied_output)
                if checkpoint.architecture == "GPT2LMHeadModel"
                else None
            ),
            attention_heads=AttentionHeads(
                config.num_heads, config.num_heads, config.hidden // config.num_heads
            ),
            activation=config.activation,
            norm_eps=config.norm_eps,
        )


def _read_layer(read: LayerReader, config: Gpt2Config, name: str) -> Gpt2Layer:
    hidden, inner = config.hidden, config.inner

    def linear(part: str, fan_in: int, fan_out: int) -> Linear:
        # unlike those of other families, these weights are saved as [in, out]
        weight = read.tensor(f"{name}.{part}.weight", fan_in, fan_out)
        return Linear(weight, read.tensor(f"{name}.{part}.bias", fan_out))

    return Gpt2Layer(
        attention_norm=read.norm(f"{name}.ln_1", hidden),
        qkv=linear("attn.c_attn", hidden, 3 * hidden),
        attention_output=linear("attn.c_proj", hidden, hidden),
        mlp_norm=read.norm(f"{name}.ln_2", hidden),
        up=linear("mlp.c_fc", hidden, inner),
        down=linear("mlp.c_proj", inner, hidden),
    )
