"""Every op of `reference` for CUDA GPUs.

An op is a Triton kernel, or plain torch where torch runs it in one fast kernel. Names and signatures are
those of `reference`, which specifies each op.
"""

from varlen_kernels.activation import activate
from varlen_kernels.append_kv import append_kv
from varlen_kernels.attention_paged import attention_paged
from varlen_kernels.attention_varlen import attention_varlen
from varlen_kernels.beam import beam_step
from varlen_kernels.embedding import embed_layer_norm
from varlen_kernels.gate import silu_gate
from varlen_kernels.layer_norm import add_layer_norm
from varlen_kernels.pooling import first_tokens, pool
from varlen_kernels.reference import linear, tanh, to_fp32
from varlen_kernels.rms_norm import rms_norm

__all__ = [
    "activate",
    "add_layer_norm",
    "append_kv",
    "attention_paged",
    "attention_varlen",
    "beam_step",
    "embed_layer_norm",
    "first_tokens",
    "linear",
    "pool",
    "rms_norm",
    "silu_gate",
    "tanh",
    "to_fp32",
]
