"""Facts that every form of an op shares, and the form for a device.

The forms are modules with one function for each op: `reference`, `cpu` and `fused`.
"""

from collections.abc import Mapping
from types import ModuleType

import torch

# For each output of an op, the position of the argument that may be its `out`.
IN_PLACE: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            "activate",
            "add_layer_norm",
            "all_reduce",
            "append_kv",
            "layer_norm",
            "norm_heads",
            "rms_norm",
            "rotary",
            "tanh",
        ),
        (0,),
    ),
    # the sum over `residual`, the norm over `x`
    **dict.fromkeys(("residual_layer_norm", "residual_rms_norm"), (1, 0)),
}


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
