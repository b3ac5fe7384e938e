"""The forms of ops for a device: `reference`, `cpu`, `fused` or `fused_ranks`."""

from types import ModuleType
from typing import Any

import torch


def kernels_for(device: torch.device, ranks: int = 1) -> ModuleType:
    """Return the module of ops for `device`: `fused` on CUDA, else `cpu`.

    Args:
        ranks: processes that hold the model; several on CUDA have `fused_ranks`.

    Raises:
        ImportError: the device is CUDA and the triton package is not installed.
    """
    # imported here: the Triton package may be missing on a machine without a GPU
    if device.type == "cuda":
        from varlen_kernels import fused

        if ranks == 1:
            return fused
        from varlen_kernels import fused_ranks

        return fused_ranks
    from varlen_kernels import cpu

    return cpu


def decode_programs(device: torch.device, **shapes: Any) -> int:
    """Return the number of programs that read one context in a decode step.

    Args:
        shapes: see `varlen_kernels.triton.attention_paged.decode_splits`.
    """
    if device.type != "cuda":
        return 1
    from varlen_kernels.triton.attention_paged import decode_splits

    return decode_splits(device, **shapes).count
