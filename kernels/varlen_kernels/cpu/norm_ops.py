"""Norms of CPUs: compiled for fp32, else in plain torch.

numba is loaded when the first one runs.

Names and signatures match `reference`.
"""

import torch
from torch import Tensor

from varlen_kernels import reference
from varlen_kernels.cpu.compiled_ops import has_numba


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(x + residual) * weight + bias, see `reference.add_layer_norm`."""
    if not _compiles(x, weight):
        return reference.add_layer_norm(x, residual, weight, bias, eps=eps, out=out)
    from varlen_kernels.cpu.norms import norm_rows

    out = torch.empty_like(x) if out is None else out
    norm_rows(x, weight, bias, eps, out, is_rms=False, residual=residual)
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return each token's layer norm, see `reference.layer_norm`."""
    if not _compiles(x, weight):
        return reference.layer_norm(x, weight, bias, eps=eps, out=out)
    from varlen_kernels.cpu.norms import norm_rows

    out = torch.empty_like(x) if out is None else out
    norm_rows(x, weight, bias, eps, out, is_rms=False)
    return out


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual and its layer norm, see `reference.residual_layer_norm`."""
    if not _compiles(x, weight):
        return reference.residual_layer_norm(x, residual, weight, bias, eps=eps, out=out)
    from varlen_kernels.cpu.norms import norm_rows

    total, normed = out or (torch.empty_like(x), torch.empty_like(x))
    norm_rows(x, weight, bias, eps, normed, is_rms=False, residual=residual, total=total)
    return total, normed


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return each token's RMS norm, see `reference.rms_norm`."""
    if not _compiles(x, weight):
        return reference.rms_norm(x, weight, eps=eps, out=out)
    from varlen_kernels.cpu.norms import norm_rows

    out = torch.empty_like(x) if out is None else out
    norm_rows(x, weight, None, eps, out, is_rms=True)
    return out


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual and its RMS norm, see `reference.residual_rms_norm`."""
    if not _compiles(x, weight):
        return reference.residual_rms_norm(x, residual, weight, eps=eps, out=out)
    from varlen_kernels.cpu.norms import norm_rows

    total, normed = out or (torch.empty_like(x), torch.empty_like(x))
    norm_rows(x, weight, None, eps, normed, is_rms=True, residual=residual, total=total)
    return total, normed


def _compiles(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype == torch.float32 and has_numba()
