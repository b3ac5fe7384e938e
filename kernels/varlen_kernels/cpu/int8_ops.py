"""The int8 ops of CPUs; numba is loaded when the first one runs.

Names and signatures match `reference.linear_int8`, with the product's name added.
"""

import torch
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
    from varlen_kernels.cpu.int8_layers import multiply_panels

    return multiply_panels(x, layer, out=out)


def linear_int8_panels_activate(
    x: Tensor, layer: Int8Weight, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of `linear_int8_panels`."""
    from varlen_kernels.cpu.int8_layers import multiply_panels

    return multiply_panels(x, layer, kind=kind, out=out)


def linear_int8_panels_add_layer_norm(
    x: Tensor,
    layer: Int8Weight,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return the layer norm of `linear_int8_panels` + residual; `out` may be `residual`."""
    from varlen_kernels.cpu.int8_layers import ResidualNorm, multiply_panels

    return multiply_panels(x, layer, norm=ResidualNorm(residual, weight, bias, eps), out=out)


def linear_int8_panels_residual_layer_norm(
    x: Tensor,
    layer: Int8Weight,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `linear_int8_panels` + residual and its layer norm; the sum may be `residual`."""
    from varlen_kernels.cpu.int8_layers import ResidualNorm, multiply_panels

    total, normed = out or (torch.empty_like(residual), torch.empty_like(residual))
    norm = ResidualNorm(residual, weight, bias, eps, total)
    return total, multiply_panels(x, layer, norm=norm, out=normed)


def linear_int8_panels_residual_rms_norm(
    x: Tensor,
    layer: Int8Weight,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `linear_int8_panels` + residual and its RMS norm; the sum may be `residual`."""
    from varlen_kernels.cpu.int8_layers import ResidualNorm, multiply_panels

    total, normed = out or (torch.empty_like(residual), torch.empty_like(residual))
    norm = ResidualNorm(residual, weight, None, eps, total, is_rms=True)
    return total, multiply_panels(x, layer, norm=norm, out=normed)
