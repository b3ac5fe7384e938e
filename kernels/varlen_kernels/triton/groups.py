"""One product for rows sorted by group, such as experts or adapters.

One program owns BLOCK_M rows of a group by BLOCK_N features. It finds its group among the bounds on the device, so a
launch depends on the number of rows and of groups only, and a CUDA graph stays valid; programs past the last tile have
nothing to do. Rows of no group count as one more group, whose results are 0.
Source: Gale et al. 2022, arXiv:2211.15841; Chen et al. 2023, arXiv:2310.18547.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.checks import (
    check_contiguous,
    check_cu_seqlens,
    check_dtype,
    check_out,
    check_row_layout,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.tuning import Launch, pick

# Rows of a group from which on tiles are large.
_MANY_ROWS = 32
_MOST_GROUPS = 4096


@triton.jit(do_not_specialize=["rows", "groups"])
def _linear_groups_kernel(
    x_ptr,  # [rows, HIDDEN]
    weight_ptr,  # [groups, FEATURES, HIDDEN]
    bounds_ptr,  # [groups + 1]
    bias_ptr,  # [groups, FEATURES], read if HAS_BIAS
    out_ptr,  # [rows, FEATURES]
    rows,
    groups,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,  # power of two > groups
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    COLUMNS: tl.constexpr = (FEATURES + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // COLUMNS
    number = tl.arange(0, BLOCK_GROUPS)
    begins = tl.load(bounds_ptr + number, mask=number <= groups, other=0)
    # the group after the last one has the other rows
    ends = tl.load(bounds_ptr + number + 1, mask=number < groups, other=0)
    ends = tl.where(number == groups, rows, ends)
    tiles = tl.where(number <= groups, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    last_tiles = tl.cumsum(tiles, axis=0)
    group = tl.sum((last_tiles <= tile).to(tl.int32), axis=0)
    is_own = number == group
    begin, end = (
        tl.sum(tl.where(is_own, begins, 0), axis=0),
        tl.sum(tl.where(is_own, ends, 0), axis=0),
    )
    first_tile = tl.sum(tl.where(is_own, last_tiles - tiles, 0), axis=0)
    # int64: rows * HIDDEN and the weights may pass 2**31; past the last tile, begin and end are 0
    row = begin + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    col = tl.program_id(0) % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    has_group = group < groups
    layer = tl.where(has_group, group, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row * X_STRIDE + k[None, :]
    weight_ptrs = weight_ptr + (layer * FEATURES + col[:, None]) * HIDDEN + k[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(0, tl.where(has_group, HIDDEN, 0), BLOCK_K):
        is_inside = k[None, :] < HIDDEN - step
        x = tl.load(x_ptrs + step, mask=(row < end) & is_inside, other=0.0)
        weight = tl.load(weight_ptrs + step, mask=(col[:, None] < FEATURES) & is_inside, other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="tf32x3")
    if HAS_BIAS:
        read_col = tl.where(has_group, col, FEATURES)
        bias = tl.load(bias_ptr + layer * FEATURES + col, mask=read_col < FEATURES, other=0.0)
        total += bias.to(tl.float32)[None, :]
    inside = (row < end) & (col[None, :] < FEATURES)
    tl.store(out_ptr + row * OUT_STRIDE + col[None, :], total, mask=inside)


def linear_groups(
    x: Tensor,
    weight: Tensor,
    cu_groups: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x @ weight[group]ᵀ + bias[group] of the group of each row, see `reference.linear_groups`.

    Raises:
        ValueError: a shape, dtype or layout is not supported.
    """
    check_dtype(x=x)
    check_row_layout(x=x)
    check_contiguous(weight=weight, bias=bias)
    (rows, hidden), (groups, features) = x.shape, weight.shape[:2]
    check_cu_seqlens(cu_groups, groups)
    if weight.shape[2] != hidden or weight.dtype != x.dtype:
        raise ValueError(
            f"weight is {list(weight.shape)} {weight.dtype}; it must be [groups, features, {hidden}] {x.dtype}"
        )
    if bias is not None and (bias.shape != (groups, features) or bias.dtype != x.dtype):
        raise ValueError(
            f"bias is {list(bias.shape)} {bias.dtype}; it must be {[groups, features]} {x.dtype}"
        )
    if groups > _MOST_GROUPS:
        raise ValueError(f"weight has {groups} groups; allowed: at most {_MOST_GROUPS}")
    out = x.new_empty(rows, features) if out is None else out
    check_out(out, (rows, features), x.dtype)
    if out.numel() == 0:
        return out
    key = (hidden, features, rows >= _MANY_ROWS * groups, x.dtype)
    launch = pick("linear_groups", key, candidate_launches)
    # each group may end with a tile that is not full
    tiles = triton.cdiv(rows, launch["BLOCK_M"]) + min(rows, groups + 1)
    _linear_groups_kernel[(tiles * triton.cdiv(features, launch["BLOCK_N"]),)](
        x,
        weight,
        cu_groups,
        x if bias is None else bias,
        out,
        rows,
        groups,
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        FEATURES=features,
        HAS_BIAS=bias is not None,
        BLOCK_GROUPS=triton.next_power_of_2(groups + 1),
        **launch,
        **dependent_launch(),
    )
    return out


def candidate_launches(
    hidden: int, features: int, has_many_rows: bool, dtype: torch.dtype
) -> list[Launch]:
    """Return the candidate launches for these sizes; the first is the default."""
    block_n, block_k = (
        max(16, triton.next_power_of_2(min(size, 64))) for size in (features, hidden)
    )
    if dtype == torch.float32:
        # the parts of a number take more registers
        block_k = min(block_k, 32)
    tiles = [(64, 4, 3), (64, 4, 2), (32, 4, 3)] if has_many_rows else [(16, 4, 3), (16, 4, 2)]
    return [
        {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "num_warps": num_warps,
            "num_stages": num_stages,
        }
        for block_m, num_warps, num_stages in tiles
    ]
