"""The int8 ops of CPUs; numba is loaded when the first one runs.

Names and signatures match `reference.linear_int8`, with the product's name added.
"""

from torch import Tensor

from varlen_kernels import Activation
from varlen_kernels.reference.linear_int8 import Int8Weight


def linear_int8(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return x @ weight + bias in int8, see `reference.linear_int8.linear_int8`."""
    from varlen_kernels.cpu.int8_torch import multiply_signed

    return multiply_signed(x, layer, out)


def linear_int8_packed(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return `linear_int8` of codes that `int8_torch.pack_codes` made."""
    from varlen_kernels.cpu.int8_torch import multiply_packed

    return multiply_packed(x, layer, out)


def linear_int8_panels(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return `linear_int8` of codes that `int8_tile.pack_panels` made."""
    from varlen_kernels.cpu.int8_panels import multiply_panels

    return multiply_panels(x, layer, out=out)


def linear_int8_panels_activate(
    x: Tensor, layer: Int8Weight, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of `linear_int8_panels`."""
    from varlen_kernels.cpu.int8_panels import multiply_panels

    return multiply_panels(x, layer, kind=kind, out=out)


def linear_int4_panels(x: Tensor, layer: Int8Weight, *, out: Tensor | None = None) -> Tensor:
    """Return `linear_int8` of codes of 4 bits that `int8_tile.pack_halves` made."""
    return linear_int8_panels(x, layer, out=out)


def linear_int4_panels_activate(
    x: Tensor, layer: Int8Weight, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of `linear_int4_panels`."""
    return linear_int8_panels_activate(x, layer, kind=kind, out=out)
