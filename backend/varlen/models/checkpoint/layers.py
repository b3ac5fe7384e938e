"""The layers that families are made of: how each is read and recorded."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from varlen.models.checkpoint.weights import CheckpointWeights
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder
    from varlen_kernels import Activation

_T = TypeVar("_T")


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

    def record_activated(self, ops: Recorder, x: Value, kind: Activation) -> Value:
        """Record the activation of x @ weight + bias, `[rows, out]`."""
        return ops.linear_activate(x, self.weight, self.bias, kind=kind)


@dataclass(frozen=True, slots=True)
class Norm:
    """The scale and shift of a norm over hidden features.

    Attributes:
        weight: `[hidden]`.
        bias: `[hidden]`, if it has one.
    """

    weight: Tensor
    bias: Tensor | None


class LayerReader(Container[str]):
    """Reads layers by their names in a checkpoint, in one dtype; nothing stays mapped.

    A family's `load` runs with it, and as the check of a checkpoint with a `HeaderReader`, which reads no weight.
    Either raises CheckpointError for a tensor that is missing, has another shape, or is quantized.
    """

    def __init__(
        self,
        weights: CheckpointWeights,
        dtype: torch.dtype,
        device: torch.device,
        last_dtype: torch.dtype | None = None,
    ) -> None:
        """Read from mapped files.

        Args:
            weights: the files.
            dtype, device: dtype and device of the layers.
            last_dtype: dtype of the layers that `last` reads; None for `dtype`.
        """
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._last_dtype = last_dtype or dtype

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    @property
    def fp32(self) -> LayerReader:
        """A reader of it in fp32."""
        import torch

        return LayerReader(self._weights, torch.float32, self._device)

    @property
    def last(self) -> LayerReader:
        """A reader of it in the dtype of the last norm and of the head."""
        return LayerReader(self._weights, self._last_dtype, self._device)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the layout of its file."""
        # a view would keep the whole file mapped, and be read page by page while requests wait
        return self._weights.read(name, *shape).to(self._device, self._dtype, copy=True)

    def rows(self, name: str, *shape: int, of: Sequence[int]) -> Tensor:
        """Return some rows of a tensor, `[len(of), ...]`."""
        # not the whole tensor in another dtype; a list of rows makes a copy
        return self._weights.read(name, *shape)[list(of)].to(self._device, self._dtype)

    def norm(self, name: str, size: int, *, bias: bool = True) -> Norm:
        """Return a norm of `size` features."""
        return Norm(
            self.tensor(f"{name}.weight", size),
            self.tensor(f"{name}.bias", size) if bias else None,
        )

    def linear(
        self, names: Sequence[str], fan_in: int, fan_outs: Sequence[int], *, bias: bool = True
    ) -> Linear:
        """Return linear layers that read one input as one layer, their outputs side by side.

        Args:
            names: names of the layers, whose files have weights `[out, in]`.
            fan_in: features of the input.
            fan_outs: features of each output.
            bias: whether they have one.
        """
        import torch

        weight = torch.empty(fan_in, sum(fan_outs), dtype=self._dtype, device=self._device)
        parts = torch.split(weight, list(fan_outs), dim=1)
        for name, fan_out, part in zip(names, fan_outs, parts, strict=True):
            stored = self._weights.read(f"{name}.weight", fan_out, fan_in).to(self._device)
            # transposes and converts at once, on the device
            part.copy_(stored.t())
        if not bias:
            return Linear(weight, None)
        biases = [
            self.tensor(f"{name}.bias", fan_out)
            for name, fan_out in zip(names, fan_outs, strict=True)
        ]
        return Linear(weight, torch.cat(biases))

    def computed(self, compute: Callable[[], _T]) -> _T:
        """Return what is computed of tensors that were read.

        A `HeaderReader` computes nothing.
        """
        return compute()
