"""What several ops in plain torch share."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

# Rows per step of ops for which torch allocates a temporary result before it is copied into `out`.
ROWS_PER_STEP = 256
# Numbers of a step of ops on scores.
_NUMBERS_PER_STEP = 1 << 20


def row_slices(rows: int) -> Iterator[slice]:
    """Yield consecutive slices of the rows, so that temporary results stay small."""
    for begin in range(0, rows, ROWS_PER_STEP):
        yield slice(begin, min(begin + ROWS_PER_STEP, rows))


def slices_of(x: Tensor) -> Iterator[slice]:
    """Yield consecutive slices of the first axis, whose numbers stay in a cache."""
    step = max(1, _NUMBERS_PER_STEP // max(1, x[:1].numel()))
    for begin in range(0, len(x), step):
        yield slice(begin, begin + step)


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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    soft_cap: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax(scores + mask) v of scores q kᵀ · scale, `[count, heads, queries, head_dim]`.

    Args:
        q: `[count, heads, queries, head_dim]`.
        k, v: `[count, kv_heads, keys, head_dim]`; neighbouring heads share one.
        mask: added to the scores, or bool: whether a query reads a key; `[queries, keys]`, or with more axes in front.
        soft_cap: limit of the scores, soft_cap · tanh(scores / soft_cap); 0 is none. With it, scores and weights are in
            fp32, or in float64 if `q` is.
        is_causal: stands for the mask that hides later keys, without `soft_cap`.
    """
    group = q.shape[1] // k.shape[1]
    if not soft_cap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
        )
    keys, values = (at_least_fp32(x).repeat_interleave(group, dim=1) for x in (k, v))
    context = torch.empty_like(q)
    for rows in row_slices(q.shape[2]):
        scores = at_least_fp32(q[:, :, rows]) @ keys.transpose(2, 3)
        scores = scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask[..., rows, :], -torch.inf)
        elif mask is not None:
            scores += mask[..., rows, :]
        context[:, :, rows] = scores.softmax(dim=3) @ values
    return context
