"""Norms of CPUs: compiled for fp32 and bf16, else in plain torch.

Names and signatures match `reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen_kernels import reference
from varlen_kernels.cpu.calls.compiled_ops import has_compiled_ops

_DTYPES = (torch.float32, torch.bfloat16)


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
    out = torch.empty_like(x) if out is None else out
    _run("add_layer_norm", (x, residual, weight, bias), [out], eps)
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
    out = torch.index_select(token_table, 0, token_ids, out=out)
    for more_ids, table in zip(ids[1:], tables[1:], strict=True):
        out += table.index_select(0, more_ids)
    return layer_norm(out, weight, bias, eps=eps, out=out)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return each token's layer norm, see `reference.layer_norm`."""
    if not _compiles(x, weight):
        return reference.layer_norm(x, weight, bias, eps=eps, out=out)
    out = torch.empty_like(x) if out is None else out
    _run("layer_norm", (x, weight, bias), [out], eps)
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
    both = out or (torch.empty_like(x), torch.empty_like(x))
    _run("residual_layer_norm", (x, residual, weight, bias), both, eps)
    return both


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return each token's RMS norm, see `reference.rms_norm`."""
    if not _compiles(x, weight):
        return reference.rms_norm(x, weight, eps=eps, out=out)
    out = torch.empty_like(x) if out is None else out
    _run("rms_norm", (x, weight), [out], eps)
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
    both = out or (torch.empty_like(x), torch.empty_like(x))
    _run("residual_rms_norm", (x, residual, weight), both, eps)
    return both


def _compiles(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.dtype in _DTYPES and has_compiled_ops()


def _run(
    kernel: str, operands: Sequence[Tensor | None], results: Sequence[Tensor], eps: float
) -> None:
    from varlen_kernels.cpu.calls.calls import run_op

    run_op(kernel, operands, results, eps=eps)
