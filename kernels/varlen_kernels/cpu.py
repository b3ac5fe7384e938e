"""The ops on CPUs: plain torch, numba or oneDNN, whichever is fastest.

Names and signatures are those of `reference`, which specifies each op.
"""

import torch
from torch import Tensor

from varlen_kernels import reference
from varlen_kernels.beam_reference import BeamCandidates, BeamEdits, check_beams
from varlen_kernels.reference import (
    activate,
    activate_gate,
    add_layer_norm,
    attention_varlen,
    embed,
    embed_layer_norm,
    first_tokens,
    layer_norm,
    linear,
    norm_heads,
    pool,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
    rotary,
    select_rows,
    tanh,
    to_fp32,
)
from varlen_kernels.sampling_reference import check_sampling

__all__ = [
    "activate",
    "activate_gate",
    "add_layer_norm",
    "append_kv",
    "attention_paged",
    "attention_varlen",
    "beam_step",
    "embed",
    "embed_layer_norm",
    "first_tokens",
    "layer_norm",
    "linear",
    "linear_packed",
    "norm_heads",
    "pool",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "rotary",
    "sample_tokens",
    "select_rows",
    "tanh",
    "to_fp32",
]


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight in the layout that oneDNN reads fastest, for `linear_packed`.

    Args:
        weight: `[hidden, features]`, as `linear` takes it, of a dtype that `can_pack` allows.
    """
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous())
    return packed


def linear_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return `linear` of a weight that `pack_weight` made, `[tokens, features]`."""
    if not len(x):
        return torch.empty(0, weight.shape[0]) if out is None else out
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product if out is None else out.copy_(product)


def append_kv(
    qkv: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Write keys and values into the caches, see `reference.append_kv`."""
    if key_cache.dtype != torch.float32:
        reference.append_kv(
            qkv, slots, key_cache, value_cache, num_heads=num_heads, num_kv_heads=num_kv_heads
        )
        return
    from varlen_kernels.paged_cpu import append_tokens

    heads = qkv.float().view(len(qkv), num_heads + 2 * num_kv_heads, key_cache.shape[3])
    append_tokens(heads, slots, key_cache, value_cache)


def attention_paged(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_ids: Tensor,
    cu_blocks: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention over KV blocks, see `reference.attention_paged`.

    Sequences of one new token are fastest if they come first.
    """
    # numba loads in half a second, and only generation needs it
    from varlen_kernels.paged_cpu import attend_tokens

    head_dim = key_cache.shape[3]
    if out is None:
        out = qkv.new_empty(len(qkv), num_heads * head_dim)
    single = _leading_ones(cu_seqlens) if key_cache.dtype == torch.float32 else 0
    if single:
        queries = qkv[:single, : num_heads * head_dim].float().contiguous()
        context = attend_tokens(
            queries.view(single, num_heads, head_dim),
            key_cache,
            value_cache,
            context_lens[:single],
            block_ids,
            cu_blocks,
            bias,
            scale=scale,
            window=window,
        )
        out[:single] = context.view(single, -1)
    if single < len(qkv):
        reference.attention_paged(
            qkv[single:],
            key_cache,
            value_cache,
            cu_seqlens[single:] - single,
            context_lens[single:],
            block_ids,
            cu_blocks[single:],
            bias,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            scale=scale,
            window=window,
            out=out[single:],
        )
    return out


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return one token of each row, see `reference.sample_tokens`."""
    from varlen_kernels.sampling_cpu import sample_rows

    check_sampling(logits, temperature, top_k, top_p, min_p, uniform, out)
    tokens = sample_rows(logits, temperature, top_k, top_p, min_p, uniform)
    return tokens if out is None else out.copy_(tokens)


def beam_step(
    logits: Tensor,
    scores: Tensor,
    finished: Tensor | None = None,
    *,
    width: int | None = None,
    edits: BeamEdits | None = None,
    out: BeamCandidates | None = None,
) -> BeamCandidates:
    """Return the best continuations of each sequence, see `reference.beam_step`."""
    from varlen_kernels.beam_cpu import step_sequences

    width = check_beams(logits, scores, finished, width, edits, out)
    if out is None:
        out = BeamCandidates.empty(len(scores), width, logits.device)
    step_sequences(logits, scores, finished, edits, out)
    return out


def _leading_ones(cu_seqlens: Tensor) -> int:
    """Return the number of sequences of one token before the first other one."""
    if int(cu_seqlens[-1]) == len(cu_seqlens) - 1:
        # none is empty
        return len(cu_seqlens) - 1
    lengths = cu_seqlens.diff()
    others = (lengths != 1).nonzero()
    return int(others[0]) if len(others) else len(lengths)
