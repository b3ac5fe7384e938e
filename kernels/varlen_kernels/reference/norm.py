"""Embeddings, norms and rotary positions in plain torch."""

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from varlen_kernels.reference.torch_parts import copy_unless_same, row_slices, split_heads

__all__ = [
    "add_layer_norm",
    "embed",
    "embed_layer_norm",
    "layer_norm",
    "norm_heads",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "rotary",
]


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
    """Return layer_norm(token + position + type embedding), `[tokens, hidden]` in the tables' dtype.

    Args:
        token_ids, position_ids, type_ids: `[tokens]` int32 or int64, each inside its table.
        token_table, position_table, type_table: `[rows, hidden]`.
        weight, bias: `[hidden]`.
        eps: added to the variance.
    """
    if out is None:
        out = token_table.new_empty(len(token_ids), token_table.shape[1])
    for rows in row_slices(len(token_ids)):
        summed = F.embedding(token_ids[rows], token_table)
        summed += F.embedding(position_ids[rows], position_table)
        summed += F.embedding(type_ids[rows], type_table)
        out[rows] = F.layer_norm(summed, weight.shape, weight, bias, eps)
    return out


def embed(
    token_ids: Tensor,
    token_table: Tensor,
    position_ids: Tensor | None = None,
    position_table: Tensor | None = None,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the embedding of each token times scale, plus the embedding of its position: `[tokens, hidden]`.

    Args:
        token_ids, position_ids: `[tokens]` int32 or int64, each inside its table.
        token_table, position_table: `[rows, hidden]`. None for both arguments of positions: they are not added.
        scale: factor of the embeddings of tokens, not of positions.
    """
    if out is None:
        out = token_table.new_empty(len(token_ids), token_table.shape[1])
    torch.index_select(token_table, 0, token_ids, out=out)
    if position_ids is not None and position_table is not None:
        for rows in row_slices(len(out)):
            positions = F.embedding(position_ids[rows], position_table)
            torch.add(positions, out[rows], alpha=scale, out=out[rows])
    elif scale != 1:
        out.mul_(scale)
    return out


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(x + residual) * weight + bias, `[tokens, hidden]` in the weight's dtype.

    Args:
        x, residual: `[tokens, hidden]`, one dtype.
        weight, bias: `[hidden]`.
        eps: added to the variance.
    """
    if out is None:
        out = torch.empty_like(x, dtype=weight.dtype)
    for rows in row_slices(len(x)):
        total = torch.add(x[rows].to(out.dtype), residual[rows], out=out[rows])
        out[rows] = F.layer_norm(total, weight.shape, weight, bias, eps)
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return each token's layer norm, times weight plus bias: `[tokens, hidden]`.

    The result has the dtype of the weight.

    Args:
        x: `[tokens, hidden]`.
        weight, bias: `[hidden]`. None for the bias: it is not added.
        eps: added to the variance.
    """
    if out is None:
        out = torch.empty_like(x, dtype=weight.dtype)
    for rows in row_slices(len(x)):
        out[rows] = F.layer_norm(x[rows].to(out.dtype), weight.shape, weight, bias, eps)
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
    """Return x + residual, which is the next sublayer's residual, and its layer norm: both `[tokens, hidden]`.

    The norm has the dtype of the weight.

    Args:
        x, residual: `[tokens, hidden]`, one dtype.
        weight, bias: `[hidden]`. None for the bias: it is not added.
        eps: added to the variance.
        out: the sum, which may be `residual`, and the norm, which may be `x`.
    """
    total, normed = out or (torch.empty_like(x), torch.empty_like(x, dtype=weight.dtype))
    torch.add(x, residual, out=total)
    return total, layer_norm(total, weight, bias, eps=eps, out=normed)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return each token divided by its root mean square, times weight: `[tokens, hidden]`.

    The result has the dtype of the weight.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden]`.
        eps: added to the mean square.

    Source: Zhang, Sennrich 2019, arXiv:1910.07467.
    """
    if out is None:
        out = torch.empty_like(x, dtype=weight.dtype)
    write_rms_norm(x, weight, eps, out)
    return out


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual, which is the next sublayer's residual, and its RMS norm: both `[tokens, hidden]`.

    The norm has the dtype of the weight.

    Args:
        x, residual: `[tokens, hidden]`, one dtype.
        weight: `[hidden]`.
        eps: added to the mean square.
        out: the sum, which may be `residual`, and the norm, which may be `x`.

    Source: Zhang, Sennrich 2019, arXiv:1910.07467.
    """
    total, normed = out or (torch.empty_like(x), torch.empty_like(x, dtype=weight.dtype))
    torch.add(x, residual, out=total)
    return total, rms_norm(total, weight, eps=eps, out=normed)


def write_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write the RMS norm of the last axis into `out`, which may be `x`."""
    if x.dtype == torch.float32:
        # without a temporary tensor of the size of x, unlike torch's rms_norm
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        torch.mul(x, scale, out=out).mul_(weight)
        return
    for rows in row_slices(len(x)):
        out[rows] = F.rms_norm(x[rows].to(out.dtype), weight.shape, weight, eps)


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
