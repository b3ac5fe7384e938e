"""Ops for transformers on packed (padding-free) input.

`reference` is the specification of every op, `cpu` runs on CPUs and `fused` on CUDA GPUs. The types and facts
below are here because importing this module does not import torch.
"""

from typing import Literal, TypeAlias

# An environment variable: another level of CPUs than the highest that this CPU has, see `cpu.target_cpu`.
CPU_LEVEL_VARIABLE = "VARLEN_CPU_LEVEL"
# How the tokens of a sequence are reduced to one vector. `mean_sqrt` is their sum divided by the root of their number;
# in the `weighted_mean` a token weighs as much as its place, counted from 1.
Pooling: TypeAlias = Literal["cls", "mean", "max", "last", "sum", "mean_sqrt", "weighted_mean"]
# How the weights of a term in the tokens of a sequence are reduced to one.
TermPooling: TypeAlias = Literal["max", "sum"]
# gelu is the exact (erf) form, gelu_tanh its tanh approximation.
Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "silu"]
# Activations that GPUs compute in the epilogue of a matrix product, see `linear_activate`.
IN_EPILOGUE: frozenset[Activation] = frozenset({"gelu_tanh", "relu"})
