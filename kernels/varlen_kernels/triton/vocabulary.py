"""Products with a vocabulary on a GPU: product and pooling for each slice of terms."""

import torch
from torch import Tensor

from varlen_kernels import TermPooling
from varlen_kernels.reference.vocabulary import SLICE_TERMS, log1p_relu_, logit_slices, new_outputs
from varlen_kernels.triton.checks import check_cu_seqlens, check_dtype, check_out, check_row_layout
from varlen_kernels.triton.pooling import pool


def term_weights(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    mode: TermPooling,
    logs: int = 1,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each term for each sequence, see `reference.term_weights`.

    Raises:
        ValueError: a shape, dtype or layout is not supported.
    """
    check_dtype(x=x)
    check_row_layout(x=x)
    check_cu_seqlens(cu_seqlens)
    weights, scratch = new_outputs(x, weight, cu_seqlens) if out is None else out
    check_out(weights, (len(cu_seqlens) - 1, weight.shape[1]), torch.float32)
    check_out(scratch, (len(x), min(weight.shape[1], SLICE_TERMS)), x.dtype)
    for terms, logits in logit_slices(x, weight, bias, scratch):
        if mode == "sum":
            log1p_relu_(logits, logs)
        pool(logits, cu_seqlens, mode=mode, out=weights[:, terms])
    if mode == "max":
        log1p_relu_(weights, logs)
    return weights, scratch
