"""The forward pass of a transformer encoder over packed tokens, written once over a `Recorder`.

Source: Vaswani et al. 2017, arXiv:1706.03762; Devlin et al. 2018, arXiv:1810.04805 (post-norm layers).
"""

from dataclasses import dataclass

import torch

from varlen.models.families import EncoderWeights, LayerWeights
from varlen.program.program import Recorder, Value


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """What a batch brings, in the order of its packed tokens."""

    token_ids: Value = Value("token_ids", ("tokens",), torch.int32)
    position_ids: Value = Value("position_ids", ("tokens",), torch.int32)
    type_ids: Value = Value("type_ids", ("tokens",), torch.int32)
    # [sequences + 1]
    cu_seqlens: Value = Value("cu_seqlens", ("sequences",), torch.int32)
    # which sequences want a vector of length 1; read by the task `embed` alone
    normalize: Value = Value("normalize", ("sequences",), torch.bool)


def encode(ops: Recorder, weights: EncoderWeights, inputs: EncoderInputs) -> Value:
    """Record the encoder and return its last hidden state, `[tokens, hidden]`."""
    x = ops.embed_layer_norm(
        inputs.token_ids,
        inputs.position_ids,
        inputs.type_ids,
        weights.token_table,
        weights.position_table,
        weights.type_table,
        weights.embedding_norm.weight,
        weights.embedding_norm.bias,
        eps=weights.norm_eps,
    )
    for layer in weights.layers:
        x = _layer(ops, weights, layer, inputs, x)
    return x


def _layer(
    ops: Recorder, weights: EncoderWeights, layer: LayerWeights, inputs: EncoderInputs, x: Value
) -> Value:
    head_dim = layer.attention_output.weight.shape[0] // weights.num_heads
    qkv = ops.linear(x, layer.qkv.weight, layer.qkv.bias)
    context = ops.attention_varlen(
        qkv, inputs.cu_seqlens, num_heads=weights.num_heads, scale=head_dim**-0.5
    )
    attended = ops.linear(context, layer.attention_output.weight, layer.attention_output.bias)
    norm = layer.attention_norm
    x = ops.add_layer_norm(attended, x, norm.weight, norm.bias, eps=weights.norm_eps)
    inner = ops.linear(x, layer.up.weight, layer.up.bias)
    inner = ops.activate(inner, kind=weights.activation)
    outer = ops.linear(inner, layer.down.weight, layer.down.bias)
    norm = layer.output_norm
    return ops.add_layer_norm(outer, x, norm.weight, norm.bias, eps=weights.norm_eps)
