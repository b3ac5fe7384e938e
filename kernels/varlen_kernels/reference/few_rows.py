"""Parts of a decode step that are one kernel on a GPU, in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels import Activation
from varlen_kernels.reference.linear_layers import (
    LinearWeight,
    activate,
    activate_gate,
    linear,
)
from varlen_kernels.reference.norm import layer_norm, rms_norm
from varlen_kernels.reference.paged import append_kv
from varlen_kernels.reference.torch_parts import at_least_fp32

__all__ = ["linear_residual", "norm_append_kv", "norm_linear", "norm_next_tokens"]


class FoldedNorm(NamedTuple):
    """The norm in front of a linear layer, to be applied behind the product.

    With weight g and bias b, layer_norm(x) @ W + c is (x·g @ W - mean · g @ W) / deviation + (b @ W + c).

    Attributes:
        weight: `[hidden]`.
        bias: `[hidden]`, if it has one.
        sums: `[features]` fp32, g @ W; None for an RMS norm.
        shift: `[features]`, b @ W + c; None for zeros.
    """

    weight: Tensor
    bias: Tensor | None
    sums: Tensor | None
    shift: Tensor | None


def norm_append_kv(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm: FoldedNorm,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position_ids: Tensor | None = None,
    cos_sin: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return the queries of norm(x) @ weight + bias, and write its keys and values; see `append_kv`.

    Returns:
        `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`; only the queries mean something.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden, (num_heads + 2 · num_kv_heads) · head_dim]`.
        bias: its bias, if it has one.
        eps: added to the mean square or the variance.
        slots, key_cache, value_cache, position_ids, cos_sin, num_heads, num_kv_heads: see `append_kv`.
    """
    qkv = linear(_normed(x, norm, eps), weight, bias, out=out)
    return append_kv(
        qkv,
        slots,
        key_cache,
        value_cache,
        position_ids,
        cos_sin,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        out=qkv,
    )


def linear_residual(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x @ weight + bias + residual, `[tokens, features]`.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden, features]`.
        bias: `[features]`.
        residual: `[tokens, features]`; may be `out`.
    """
    return torch.add(linear(x, weight, bias), residual, out=out)


def norm_linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm: FoldedNorm,
    *,
    eps: float,
    kind: Activation | None = None,
    is_gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return norm(x) @ weight + bias, perhaps activated: `[tokens, features]`, half as many if it is gated.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden, features]`.
        bias: `[features]`.
        eps: added to the mean square or the variance.
        kind: the activation; None for none.
        is_gated: whether features are gates, then what they multiply; see `activate_gate`.
    """
    normed = _normed(x, norm, eps)
    if kind is None:
        return linear(normed, weight, bias, out=out)
    act = activate_gate if is_gated else activate
    return act(linear(normed, weight, bias), kind=kind, out=out)


def norm_next_tokens(
    x: Tensor,
    rows: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm: FoldedNorm,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the logits of some rows, and the token of the largest.

    The first one of equal logits counts as the largest.

    Returns:
        `[rows, vocabulary]` fp32 and `[rows]` int32.

    Args:
        x: `[tokens, hidden]`.
        rows: `[rows]` int32, tokens with logits.
        weight: the output layer, `[hidden, vocabulary]`.
        bias: `[vocabulary]`.
        eps: added to the mean square or the variance.
    """
    logits = at_least_fp32(linear(_normed(x[rows], norm, eps), weight, bias))
    if out is None:
        return logits, logits.argmax(1).int()
    out[1].copy_(logits.argmax(1))
    return out[0].copy_(logits), out[1]


def _normed(x: Tensor, norm: FoldedNorm, eps: float) -> Tensor:
    if norm.sums is None:
        return rms_norm(x, norm.weight, eps=eps)
    return layer_norm(x, norm.weight, norm.bias, eps=eps)
