"""The int8 ops of CPUs.

Names and signatures match `reference.linear_int8`, with the product's name added.
"""

import torch
from torch import Tensor

from varlen_kernels import Activation
from varlen_kernels.reference.linear_int8 import Int8Weight


def linear_int8(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return x @ weight + bias in int8, see `reference.linear_int8.linear_int8`."""
    from varlen_kernels.cpu.calls.int8_torch import multiply_signed

    return multiply_signed(x, layer, out)


def linear_int8_packed(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return `linear_int8` of codes that `int8_torch.pack_codes` made."""
    from varlen_kernels.cpu.calls.int8_torch import multiply_packed

    return multiply_packed(x, layer, out)


def linear_int8_panels(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return `linear_int8` of codes that `int8_layout.pack_panels` made."""
    return _run("linear_int8_panels", x, layer, out)


def linear_int8_panels_activate(
    x: Tensor, layer: Int8Weight, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of `linear_int8_panels`."""
    return _run("linear_int8_panels_activate", x, layer, out, kind=kind)


def linear_int4_panels(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return `linear_int8` of codes of 4 bits that `int8_layout.pack_halves` made."""
    return _run("linear_int4_panels", x, layer, out)


def linear_int4_panels_activate(
    x: Tensor, layer: Int8Weight, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of `linear_int4_panels`."""
    return _run("linear_int4_panels_activate", x, layer, out, kind=kind)


def _run(
    kernel: str, x: Tensor, layer: Int8Weight, out: Tensor | None, **attributes: Activation
) -> Tensor:
    from varlen_kernels.cpu.calls.calls import run_op

    out = torch.empty(len(x), len(layer.scale)) if out is None else out
    run_op(kernel, (x, layer), [out], **attributes)
    return out
