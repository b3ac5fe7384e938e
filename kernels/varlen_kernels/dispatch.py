"""Choice between the fused and the reference ops, by device."""

from types import ModuleType

import torch


def decoder_kernels_for(device: torch.device) -> ModuleType:
    """Return the module of ops that generate on `device`: `fused` on CUDA, else `cpu`.

    Raises:
        ImportError: the device is CUDA and the triton package is not installed.
    """
    if device.type == "cuda":
        return kernels_for(device)
    from varlen_kernels import cpu

    return cpu


def kernels_for(device: torch.device) -> ModuleType:
    """Return the module of ops for `device`: `fused` on CUDA, else `reference`.

    Raises:
        ImportError: the device is CUDA and the triton package is not installed.
    """
    # imported here: the Triton package may be missing on a machine without a GPU
    if device.type == "cuda":
        from varlen_kernels import fused

        return fused
    from varlen_kernels import reference

    return reference
