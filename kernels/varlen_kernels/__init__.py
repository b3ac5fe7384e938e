"""Packed (padding-free) ops for transformers of every input length.

`reference` is the specification of every op and the path that runs on a CPU. The words below are
here so that naming them does not import torch.
"""

from typing import Literal, TypeAlias

# How one vector is made of a sequence's tokens.
Pooling: TypeAlias = Literal["cls", "mean", "max", "last"]
# gelu is the exact (erf) form.
Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu"]
