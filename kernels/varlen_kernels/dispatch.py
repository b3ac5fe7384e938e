"""The one place that chooses between the two forms of every op, by device."""

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """Return the module whose functions run the ops on `device`: `fused` on CUDA, else `reference`.

    Raises:
        ImportError: the device is CUDA and the triton package is not installed.
    """
    # imported here, since a machine without a GPU need not have Triton
    if device.type == "cuda":
        from varlen_kernels import fused

        return fused
    from varlen_kernels import reference

    return reference
