"""Norms and rotary positions of query and key heads in plain torch."""

import torch
from torch import Tensor

from varlen_kernels.reference.norm import write_rms_norm
from varlen_kernels.reference.torch_parts import copy_unless_same, row_slices, split_heads

__all__ = ["norm_heads", "rotary"]


def norm_heads(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return `qkv` with the RMS norm of each query and key head; values are unchanged.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: queries, keys, values of each token.
        query_weight, key_weight: `[head_dim]`.
        eps: added to the mean square.
        out: may be `qkv`.
    """
    out = copy_unless_same(qkv, out)
    queries, keys, _ = split_heads(out, num_heads, num_kv_heads)
    write_rms_norm(queries, query_weight, eps, queries)
    write_rms_norm(keys, key_weight, eps, keys)
    return out


def rotary(
    qkv: Tensor,
    position_ids: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return `qkv` with rotated queries and keys; values are unchanged.

    Feature i of a head is rotated together with feature i + rotary_dim / 2, by the angle of its position; features
    from rotary_dim on are not rotated.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: queries, keys, values of each token.
        position_ids: `[tokens]` int32.
        cos_sin: `[positions, rotary_dim]` fp32: the cosines of rotary_dim / 2 angles, then their sines.
        out: may be `qkv`.

    Source: Su et al. 2021, arXiv:2104.09864; halves as in GPT-NeoX.
    """
    out = copy_unless_same(qkv, out)
    queries, keys, _ = split_heads(out, num_heads, num_kv_heads)
    half = cos_sin.shape[1] // 2
    for rows in row_slices(len(out)):
        # [rows, 1, half]
        cos, sin = torch.split(cos_sin.index_select(0, position_ids[rows])[:, None], half, dim=2)
        for heads in (queries[rows], keys[rows]):
            first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
            # in fp32, `first` and `second` are views: the second half is written first
            rotated = first * cos - second * sin
            heads[..., half : 2 * half] = second * cos + first * sin
            heads[..., :half] = rotated
    return out
