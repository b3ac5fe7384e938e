"""Copies of arrays to the memory of a device."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Numbers of 4 bytes that keep what follows at an address of 16 bytes.
_ALIGNED = 4


def moved(
    groups: Sequence[Mapping[str, npt.NDArray[Any]]], device: torch.device
) -> list[dict[str, Tensor]]:
    """Return arrays of int32 and fp32 on a device; one copy, without a wait."""
    if device.type == "cpu":
        return [{name: torch.from_numpy(array) for name, array in each.items()} for each in groups]
    arrays = [each for group in groups for each in group.values()]
    # the language Triton compiles a kernel again where the alignment of a pointer is another one
    sizes = [-(-each.size // _ALIGNED) * _ALIGNED for each in arrays]
    numbers = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    on_host = np.split(numbers.numpy(), np.cumsum(sizes)[:-1])
    for array, part in zip(arrays, on_host, strict=True):
        part[: array.size] = array.ravel().view(np.int32)
    # torch keeps pinned memory until the copy has run
    parts = torch.split_with_sizes(numbers.to(device, non_blocking=True), sizes)
    on_device = (
        (part if array.dtype == np.int32 else part.view(torch.float32))[: array.size].view(
            array.shape
        )
        for array, part in zip(arrays, parts, strict=True)
    )
    return [{name: next(on_device) for name in group} for group in groups]
