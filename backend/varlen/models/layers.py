"""The layers that families are made of: their weights, and how each is recorded."""

from dataclasses import dataclass

from torch import Tensor

from varlen.program.program import Value
from varlen.program.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer.

    Attributes:
        weight: `[in, out]`, contiguous; see `varlen_kernels.reference.linear`.
        bias: `[out]`, if it has one.
    """

    weight: Tensor
    bias: Tensor | None

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record x @ weight + bias, `[rows, out]`."""
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """The scale and shift of a norm over hidden features.

    Attributes:
        weight: `[hidden]`.
        bias: `[hidden]`, if it has one.
    """

    weight: Tensor
    bias: Tensor | None
