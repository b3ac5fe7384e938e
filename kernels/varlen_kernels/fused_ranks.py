# mypy: implicit-reexport
# ruff: noqa: F403  # the ops
"""Every op of `fused`, and the ops between ranks that have a GPU each.

These are collectives of torch.distributed, in the group of the process. Source: Shoeybi et al. 2019, arXiv:1909.08053.
"""

import torch
from torch import Tensor, distributed

from varlen_kernels.fused import *
from varlen_kernels.reference.ranks import local_ids  # noqa: F401  # another op

# torch 2.13 has a new name
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def all_reduce(  # type: ignore[no-redef]  # fused has none
    x: Tensor, ranks: Tensor, *, rank: int, size: int, out: Tensor | None = None
) -> Tensor:
    """Return the sum of `x` over all ranks, see `reference.all_reduce`.

    NCCL adds in the dtype of `x`, and rounds once for each rank but one; all ranks get the same bits.
    """
    # the group has them
    del ranks, rank, size
    if out is None:
        out = torch.empty_like(x)
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    distributed.all_reduce(out)
    return out


def gather_columns(  # type: ignore[no-redef]  # fused has none
    x: Tensor, ranks: Tensor, *, rank: int, size: int, width: int, out: Tensor | None = None
) -> Tensor:
    """Return the columns of all ranks side by side, on every rank; see `reference.gather_columns`."""
    del ranks, rank
    rows, columns = x.shape
    most = -(-width // size)
    # all ranks bring as many numbers; the last columns are dropped
    part = x.new_zeros(rows, most)
    part[:, :columns] = x
    parts = x.new_empty(size * rows, most)
    _gather(parts, part)
    joined = parts.view(size, rows, most).transpose(0, 1).reshape(rows, size * most)[:, :width]
    return joined if out is None else out.copy_(joined)
