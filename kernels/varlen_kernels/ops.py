"""The forms of ops for a device: `reference`, `cpu` or `fused`."""

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """Return the module of ops for `device`: `fused` on CUDA, else `cpu`.

    Raises:
        ImportError: the device is CUDA and the triton package is not installed.
    """
    # imported here: the Triton package may be missing on a machine without a GPU
    if device.type == "cuda":
        from varlen_kernels import fused

        return fused
    from varlen_kernels import cpu

    return cpu
