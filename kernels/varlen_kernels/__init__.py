"""Ops for transformers on packed (padding-free) input.

`reference` is the specification of every op, `cpu` runs on CPUs and `fused` on CUDA GPUs. The types below
are here because importing this module does not import torch.
"""

from typing import Literal, TypeAlias

# How the tokens of a sequence are reduced to one vector.
Pooling: TypeAlias = Literal["cls", "mean", "max", "last"]
# gelu is the exact (erf) form, gelu_tanh its tanh approximation.
Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "silu"]
