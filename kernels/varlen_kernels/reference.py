"""Every op in plain torch: the specification that kernels are tested against, and the CPU path.

All tokens of a batch stand in one `[tokens, ...]` tensor, sequence after sequence; `cu_seqlens`
`[batch + 1]` int32 holds where each one starts. No op pads. Each op writes into `out=` when it is
given and returns the tensor it wrote; `out` of the ops named in `IN_PLACE` may be their first
argument.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen_kernels import Activation, Pooling

# Ops whose `out` may be their first argument.
IN_PLACE = frozenset({"activate", "add_layer_norm", "tanh", "l2_normalize"})

# Shortest divisor that torch.nn.functional.normalize accepts, and so sentence-transformers.
_NORM_FLOOR = 1e-12


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
    """Return layer_norm(token + position + type embedding), `[tokens, hidden]` in the dtype of the tables.

    Args:
        token_ids, position_ids, type_ids: `[tokens]` int32 or int64, each inside its table.
        token_table, position_table, type_table: `[rows, hidden]`.
        weight, bias: `[hidden]`.
        eps: added to the variance.
    """
    summed = F.embedding(token_ids, token_table)
    summed += F.embedding(position_ids, position_table)
    summed += F.embedding(type_ids, type_table)
    return _write(F.layer_norm(summed, weight.shape, weight, bias, eps), out)


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x @ weight + bias, `[tokens, features]`.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden, features]`, contiguous: on few tokens a CPU multiplies this form faster than
            torch's `[features, hidden]` (docs/decisions/0002-weights-in-out.md).
        bias: `[features]`.
    """
    return torch.addmm(bias, x, weight, out=out)


def activate(x: Tensor, *, kind: Activation, out: Tensor | None = None) -> Tensor:
    """Return the activation of every element: exact (erf) GELU, its tanh form, or ReLU."""
    if kind == "relu":
        return torch.clamp_min(x, 0, out=out)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    if out is None:
        return F.gelu(x, approximate=approximate)
    return torch.ops.aten.gelu.out(x, approximate=approximate, out=out)  # type: ignore[no-any-return]


def tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return tanh of every element."""
    return torch.tanh(x, out=out)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(x + residual) * weight + bias, `[tokens, hidden]`.

    Args:
        x, residual: `[tokens, hidden]`, one dtype.
        weight, bias: `[hidden]`.
        eps: added to the variance.
    """
    total = torch.add(x, residual, out=out)
    return _write(F.layer_norm(total, weight.shape, weight, bias, eps), out)


def attention_varlen(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,  # noqa: ARG001  # of the signature that launchers share
    *,
    num_heads: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale) v inside each sequence, `[tokens, num_heads · head_dim]`.

    Neighbours of one length run as one call, so a batch sorted by length takes few calls.

    Args:
        qkv: `[tokens, 3 · num_heads · head_dim]`: all queries of a token, then its keys, then its values.
        cu_seqlens: `[batch + 1]` int32, ascending from 0 to tokens.
        max_seqlen: the longest sequence, in tokens. A launcher sizes its grid by it; here it is implied.
        scale: multiplies the scores, usually head_dim ** -0.5.
    """
    tokens, width = qkv.shape
    head_dim = width // (3 * num_heads)
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    for start, count, length in _runs_of_equal_length(cu_seqlens):
        rows = slice(start, start + count * length)
        # [3, count, num_heads, length, head_dim], a view
        q, k, v = qkv[rows].view(count, length, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, scale=scale)
        out[rows].view(count, length, num_heads, head_dim).copy_(context.transpose(1, 2))
    return out


def pool(x: Tensor, cu_seqlens: Tensor, *, mode: Pooling, out: Tensor | None = None) -> Tensor:
    """Return one fp32 vector per sequence, `[batch, hidden]`: its first or last token, or the mean or maximum of all.

    Args:
        x: `[tokens, hidden]`.
        cu_seqlens: `[batch + 1]` int32; every sequence has at least one token.
    """
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if mode == "cls":
        pooled = x[starts]
    elif mode == "last":
        pooled = x[ends - 1]
    else:
        pooled = torch.segment_reduce(x.float(), mode, lengths=ends - starts, axis=0)
    return _write(pooled.float(), out)


def first_tokens(x: Tensor, cu_seqlens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the first token of each sequence, `[batch, hidden]` in the dtype of `x`."""
    return torch.index_select(x, 0, cu_seqlens[:-1], out=out)


def l2_normalize(x: Tensor, chosen: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return `x` with the chosen rows divided by their Euclidean norm.

    Args:
        x: `[batch, hidden]` fp32.
        chosen: `[batch]` bool.
    """
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min_(_NORM_FLOOR)
    return torch.div(x, torch.where(chosen[:, None], norms, 1.0), out=out)


def to_fp32(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of `x` in fp32."""
    return _write(x.to(torch.float32, copy=out is None), out)


def _runs_of_equal_length(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, sequences, length) for each run of neighbours of one length, skipping empty sequences."""
    bounds = cu_seqlens.tolist()
    start, count, length = 0, 0, 0
    for begin, end in pairwise(bounds):
        if end - begin != length:
            if count and length:
                yield start, count, length
            start, count, length = begin, 0, end - begin
        count += 1
    if count and length:
        yield start, count, length


def _write(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)
