"""What several ops in plain torch share."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Rows per step of ops for which torch allocates a temporary result before it is copied into `out`.
ROWS_PER_STEP = 256


def row_slices(rows: int) -> Iterator[slice]:
    """Yield consecutive slices of the rows, so that temporary results stay small."""
    for begin in range(0, rows, ROWS_PER_STEP):
        yield slice(begin, min(begin + ROWS_PER_STEP, rows))


def copy_unless_same(x: Tensor, out: Tensor | None) -> Tensor:
    """Return `out` with the content of `x`: a copy, unless they are the same memory."""
    if out is None:
        return x.clone()
    return out if out.data_ptr() == x.data_ptr() else out.copy_(x)


def write_out(result: Tensor, out: Tensor | None) -> Tensor:
    """Return the result, or `out` with its content."""
    return result if out is None else out.copy_(result)


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as views, `[tokens, heads, head_dim]` each."""
    heads = [num_heads, num_kv_heads, num_kv_heads]
    by_head = qkv.view(len(qkv), sum(heads), qkv.shape[1] // sum(heads))
    queries, keys, values = torch.split(by_head, heads, dim=1)
    return queries, keys, values


def bias_by_distance(bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the bias of queries and keys at these positions, `[num_heads, queries, keys]`."""
    reach = bias.shape[1] // 2
    distance = (keys - queries[:, None]).clamp(-reach, reach)
    return at_least_fp32(bias[:, distance + reach])


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
