"""The Llama family: rotary positions, grouped heads, gated feed-forward parts, RMS norms.

Llama, Mistral, Qwen2 and Qwen3 are this decoder with other options.
Source: Touvron et al. 2023, arXiv:2302.13971; Jiang et al. 2023, arXiv:2310.06825 (windows); Yang et al. 2024,
arXiv:2407.10671 (biases); Yang et al. 2025, arXiv:2505.09388 (norms of queries and keys); tensor names as Hugging
Face transformers saves them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.models.blocks import inputs
from varlen.models.blocks.attention import Attention
from varlen.models.blocks.output import read_output, record_output
from varlen.models.blocks.rotary import rotary_table
from varlen.models.checkpoint.layers import LayerReader, Linear
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.llama_checkpoint import LlamaConfig, prefix_of
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One transformer layer.

    Attributes:
        attention_norm, mlp_norm: `[hidden]`, weights of the norms before the two parts.
        qkv: query, key and value, side by side.
        head_norms: `[head_dim]` of queries and of keys, if they are normed.
        gate_up: gate and up, side by side.
        window: number of last tokens that a token reads; 0 is all.
    """

    attention_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int


@dataclass(frozen=True, slots=True)
class Llama:
    """A decoder of the Llama family in one dtype.

    Attributes:
        token_table: `[vocabulary, hidden]`.
        cos_sin: `[positions, head_dim]` fp32, see `varlen_kernels.reference.rotary`.
        output: `[hidden, vocabulary]`; None where the checkpoint has no output layer.
    """

    token_table: Tensor
    cos_sin: Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm: Tensor
    output: Linear | None
    attention_heads: AttentionHeads
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
        eps = self.norm_eps
        residual = ops.embed(inputs.token_ids(ops), self.token_table)
        # the norm before each layer, and the final one
        norms = [*(layer.attention_norm for layer in self.layers), self.final_norm]
        x = ops.rms_norm(residual, norms[0], eps=eps)
        for number, layer in enumerate(self.layers):
            attended = self._record_attention(ops, attention, number, x)
            residual, x = ops.residual_rms_norm(attended, residual, layer.mlp_norm, eps=eps)
            inner = ops.activate_gate(layer.gate_up.record(ops, x), kind="silu")
            x = layer.down.record(ops, inner)
            residual, x = ops.residual_rms_norm(x, residual, norms[number + 1], eps=eps)
        return x

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""
        # Checkpoint.check_task has refused checkpoints without this layer
        assert self.output is not None
        return record_output(ops, self.output, hidden)

    def _record_attention(
        self, ops: Recorder, attention: Attention, number: int, x: Value
    ) -> Value:
        layer, heads = self.layers[number], self.attention_heads
        qkv = layer.qkv.record(ops, x)
        if layer.head_norms is not None:
            qkv = ops.norm_heads(qkv, *layer.head_norms, heads, eps=self.norm_eps)
        qkv = ops.rotary(qkv, inputs.position_ids(ops), self.cos_sin, heads)
        context = attention.record(ops, number, qkv, heads, window=layer.window)
        return layer.attention_output.record(ops, context)


def load_llama(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, norm_dtype: torch.dtype
) -> Llama:
    """Return the Llama, Mistral, Qwen2 or Qwen3 of a checkpoint in `dtype` on `device`.

    Args:
        checkpoint, dtype, device: the model's folder, and the dtype and device of its weights.
        norm_dtype: dtype of the final norm, and so of the last hidden state.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = LlamaConfig.read(checkpoint.config)
    with CheckpointWeights(checkpoint.folder) as weights:
        read, prefix = LayerReader(weights, dtype, device), prefix_of(weights)
        table = read.tensor(f"{prefix}embed_tokens.weight", config.vocab_size, config.hidden)
        return Llama(
            token_table=table,
            cos_sin=rotary_table(config.rotary, config.head_dim, device),
            layers=tuple(
                _read_layer(read, config, f"{prefix}layers.{index}", window)
                for index, window in enumerate(config.windows)
            ),
            final_norm=LayerReader(weights, norm_dtype, device).tensor(
                f"{prefix}norm.weight", config.hidden
            ),
            output=(
                read_output(read, table, is_tied=config.has_tied_output)
                if checkpoint.architecture.endswith("ForCausalLM")
                else None
            ),
            attention_heads=AttentionHeads(config.num_heads, config.num_kv_heads, config.head_dim),
            norm_eps=config.norm_eps,
        )


def _read_layer(read: LayerReader, config: LlamaConfig, name: str, window: int) -> LlamaLayer:
    hidden, inner, head_dim = config.hidden, config.inner, config.head_dim
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return LlamaLayer(
        attention_norm=read.tensor(f"{name}.input_layernorm.weight", hidden),
        qkv=read.linear(
            [f"{attention}.{part}_proj" for part in "qkv"],
            hidden,
            [config.query_width, config.key_width, config.key_width],
            bias=config.has_qkv_bias,
        ),
        head_norms=(
            (
                read.tensor(f"{attention}.q_norm.weight", head_dim),
                read.tensor(f"{attention}.k_norm.weight", head_dim),
            )
            if config.has_head_norms
            else None
        ),
        attention_output=read.linear(
            [f"{attention}.o_proj"], config.query_width, [hidden], bias=config.has_output_bias
        ),
        mlp_norm=read.tensor(f"{name}.post_attention_layernorm.weight", hidden),
        gate_up=read.linear(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            hidden,
            [inner, inner],
            bias=config.has_mlp_bias,
        ),
        down=read.linear([f"{mlp}.down_proj"], inner, [hidden], bias=config.has_mlp_bias),
        window=window,
    )
