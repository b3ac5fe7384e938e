"""Guarded output tensors: full of NaN before a kernel runs, with guard bytes around them."""

from collections.abc import Callable

import torch

_GUARD_ELEMENTS = 64
_GUARD_BYTE = 0xA5


class Guarded:
    """A tensor inside a larger buffer whose other bytes must not change.

    Attributes:
        tensor: the output: NaN (-1 in integer dtypes), with `gap` elements between its rows.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, gap: int = 0
    ) -> None:
        *rows, width = shape
        count = torch.Size(rows).numel()
        size = count * (width + gap) + 2 * _GUARD_ELEMENTS
        self._bytes = torch.full(
            (size * dtype.itemsize,), _GUARD_BYTE, dtype=torch.uint8, device=device
        )
        inner = self._bytes.view(dtype)[_GUARD_ELEMENTS : size - _GUARD_ELEMENTS]
        table = inner.view(count, width + gap)[:, :width]
        self.tensor = table.unflatten(0, rows) if rows else table[0]
        # every bit set is a NaN in each float format
        self.tensor.copy_(_ones(shape, dtype, device))
        self._before = self._bytes.clone()

    def check(self) -> None:
        """Fail if a byte outside the tensor changed."""
        after = self._bytes.clone()
        written = self.tensor.clone()
        self._bytes.copy_(self._before)
        self.tensor.copy_(written)
        assert torch.equal(self._bytes, after), "the kernel wrote outside its output"


def write_guarded(
    call: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    gap: int = 0,
) -> torch.Tensor:
    """Return the guarded `out` that `call(out)` wrote into and returned."""
    guarded = Guarded(shape, dtype, device, gap)
    returned = call(guarded.tensor)
    assert returned.data_ptr() == guarded.tensor.data_ptr(), "the result is not in `out`"
    guarded.check()
    return guarded.tensor


def _ones(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with every bit set."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.full(shape, -1, dtype=integer, device=device).view(dtype)
