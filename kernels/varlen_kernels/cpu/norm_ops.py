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


def embed_layer_norm(
    token_ids: Tensor,
    position_ids: Tensor,
    type_ids: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    type_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return the layer norm of summed embeddings, see `reference.embed_layer_norm`."""
    ids, tables = (
        (token_ids, position_ids, type_ids),
        (token_table, position_table, type_table),
    )
    if not _compiles(token_table, weight):
        return reference.embed_layer_norm(*ids, *tables, weight, bias, eps=eps, out=out)
    from varlen_kernels.cpu.norms import norm_rows

    out = torch.index_select(token_table, 0, token_ids, out=out)
    for more_ids, table in zip(ids[1:], tables[1:], strict=True):
        out += table.index_select(0, more_ids)
    norm_rows(out, weight, bias, eps, out, is_rms=False)
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
