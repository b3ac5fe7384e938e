# mypy: implicit-reexport
# ruff: noqa: F401  # the ops
"""Every op on CPUs: plain torch, compiled code or oneDNN, whichever is fastest.

Names and signatures match `reference`, which specifies each op.
"""

import torch
from torch import Tensor

from varlen_kernels import Activation, reference
from varlen_kernels.cpu.beam_ops import advance_searches, beam_step, follow_beams
from varlen_kernels.cpu.calls.compiled_ops import has_compiled_ops
from varlen_kernels.cpu.int8_ops import (
    linear_int4_panels,
    linear_int4_panels_activate,
    linear_int8,
    linear_int8_packed,
    linear_int8_panels,
    linear_int8_panels_activate,
)
from varlen_kernels.cpu.norm_ops import (
    add_layer_norm,
    embed_layer_norm,
    layer_norm,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from varlen_kernels.cpu.packed import can_pack, linear_packed
from varlen_kernels.cpu.panel_ops import (
    linear_panels,
    linear_panels_activate,
)
from varlen_kernels.cpu.widened import linear_widened
from varlen_kernels.reference import (
    attention_tiles,
    concat,
    embed,
    first_tokens,
    local_ids,
    norm_heads,
    normalize_rows,
    paged_tiles,
    pool,
    rotary,
    select_rows,
    tanh,
    term_weights,
    to_fp32,
    top_terms,
)
from varlen_kernels.reference.attention import Distances
from varlen_kernels.reference.logit_edits import EditLists, EditState, check_edits
from varlen_kernels.reference.paged import check_copies
from varlen_kernels.reference.sampling import check_sampling

_COMPILED_DTYPES = (torch.float32, torch.bfloat16)
# Features of an activation below which torch runs it: for one token the call of compiled code takes longer.
_LEAST_FEATURES = 1024
# Multiplications that take as long as one logit of a choice by chance.
_OF_SAMPLED_LOGIT = 128


def activate(
    x: Tensor, bias: Tensor | None = None, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of x + bias, see `reference.activate`."""
    if not _compiles_activation(x, kind, x.shape[1]):
        return reference.activate(x, bias, kind=kind, out=out)
    from varlen_kernels.cpu.calls.calls import run_op

    out = torch.empty_like(x) if out is None else out
    run_op("activate", (x, bias), [out], kind=kind)
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return x @ weight + bias, see `reference.linear`."""
    if x.dtype == torch.bfloat16 and not can_pack(torch.bfloat16):
        return linear_widened(x, weight, bias, out=out)
    return reference.linear(x, weight, bias, out=out)


def linear_activate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return the activation of x @ weight + bias, see `reference.linear_activate`."""
    product = linear(x, weight, bias, out=out)
    return activate(product, kind=kind, out=product)


def activate_gate(x: Tensor, *, kind: Activation, out: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up, see `reference.activate_gate`."""
    if not _compiles_activation(x, kind, x.shape[1] // 2):
        return reference.activate_gate(x, kind=kind, out=out)
    from varlen_kernels.cpu.calls.calls import run_op

    out = x.new_empty(len(x), x.shape[1] // 2) if out is None else out
    run_op("activate_gate", (x,), [out], kind=kind)
    return out


def attention_varlen(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,
    distances: Distances | None = None,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float,
    causal: bool = False,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention inside each sequence, see `reference.attention_varlen`."""
    if qkv.dtype not in _COMPILED_DTYPES or not has_compiled_ops():
        return reference.attention_varlen(
            qkv,
            cu_seqlens,
            bias,
            tiles,
            distances,
            key_lengths,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            scale=scale,
            causal=causal,
            window=window,
            out=out,
        )
    from varlen_kernels.cpu.calls.calls import run_op

    kv_heads = num_kv_heads or num_heads
    if out is None:
        head_dim = qkv.shape[1] // (num_heads + 2 * kv_heads)
        out = qkv.new_empty(len(qkv), num_heads * head_dim)
    run_op(
        "attention_varlen",
        (qkv, cu_seqlens, _in_fp32(bias), None, distances, key_lengths),
        [out],
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        scale=scale,
        causal=causal,
        window=window,
    )
    return out


def copy_blocks(memory: Tensor, copies: Tensor) -> None:
    """Copy KV blocks of all layers, see `reference.copy_blocks`."""
    if not has_compiled_ops():
        reference.copy_blocks(memory, copies)
        return
    from varlen_kernels.cpu.calls.calls import call_each

    check_copies(memory, copies)
    block_bytes = memory[0, 0].nbytes
    call_each("copy_blocks", [(memory, copies)], (block_bytes, memory[0].nbytes), units=len(memory))


def all_reduce(
    x: Tensor, ranks: Tensor, *, rank: int, size: int, out: Tensor | None = None
) -> Tensor:
    """Return the sum of `x` over all ranks, see `reference.all_reduce`."""
    out = torch.empty_like(x) if out is None else out
    if x.dtype not in _COMPILED_DTYPES or not has_compiled_ops():
        return reference.all_reduce(x, ranks, rank=rank, size=size, out=out)
    from varlen_kernels.cpu.calls.calls import run_op

    run_op("all_reduce", (x, ranks), [out], rank=rank, size=size)
    return out


def gather_columns(
    x: Tensor, ranks: Tensor, *, rank: int, size: int, width: int, out: Tensor | None = None
) -> Tensor:
    """Return the columns of all ranks side by side, see `reference.gather_columns`."""
    out = x.new_empty(len(x), width) if out is None else out
    if x.dtype not in _COMPILED_DTYPES or not has_compiled_ops():
        return reference.gather_columns(x, ranks, rank=rank, size=size, width=width, out=out)
    from varlen_kernels.cpu.calls.calls import run_op

    run_op("gather_columns", (x, ranks), [out], rank=rank, size=size)
    return out


def append_kv(
    qkv: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position_ids: Tensor | None = None,
    cos_sin: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Write keys and values into the caches and return the rows with queries, see `reference.append_kv`."""
    operands = (
        qkv,
        slots,
        key_cache,
        value_cache,
        position_ids,
        cos_sin,
        query_weight,
        key_weight,
    )
    if not _reads_blocks(qkv, key_cache, value_cache):
        return reference.append_kv(
            *operands, num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps, out=out
        )
    from varlen_kernels.cpu.calls.calls import run_op

    results = []
    if cos_sin is not None:
        results = [torch.empty_like(qkv) if out is None else out]
    run_op("append_kv", operands, results, num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps)
    return results[0] if results else qkv


def attention_paged(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_ids: Tensor,
    cu_blocks: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,  # noqa: ARG001  # part of the op
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention over KV blocks, see `reference.attention_paged`."""
    tables = cu_seqlens, context_lens, block_ids, cu_blocks
    if not _reads_blocks(qkv, key_cache, value_cache):
        return reference.attention_paged(
            qkv,
            key_cache,
            value_cache,
            *tables,
            bias,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            scale=scale,
            window=window,
            out=out,
        )
    from varlen_kernels.cpu.calls.calls import run_op

    if out is None:
        out = qkv.new_empty(len(qkv), num_heads * key_cache.shape[3])
    run_op(
        "attention_paged",
        (qkv, key_cache, value_cache, *tables, _in_fp32(bias)),
        [out],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        window=window,
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
    if not has_compiled_ops():
        return reference.sample_tokens(logits, temperature, top_k, top_p, min_p, uniform, out=out)
    from varlen_kernels.cpu.calls.calls import call

    check_sampling(logits, temperature, top_k, top_p, min_p, uniform, out)
    tokens = torch.empty(len(logits), dtype=torch.int32)
    call(
        "sample",
        (logits, temperature, top_k, top_p, min_p, uniform),
        [tokens],
        dtypes="ffiffei",
        units=len(logits),
        multiplications=_OF_SAMPLED_LOGIT * logits.numel(),
    )
    return tokens if out is None else out.copy_(tokens)


def edit_logits(
    logits: Tensor,
    token_ids: Tensor,
    logit_rows: Tensor,
    rows: Tensor,
    penalties: Tensor,
    begun: EditLists,
    state: EditState,
) -> None:
    """Change the logits of the tokens of some sequences' lists, see `reference.edit_logits`."""
    if not has_compiled_ops():
        reference.edit_logits(logits, token_ids, logit_rows, rows, penalties, begun, state)
        return
    from varlen_kernels.cpu.calls.calls import call

    check_edits(logits, rows, penalties, begun, state)
    call(
        "edit_logits",
        (token_ids, logit_rows, rows, penalties, *begun),
        (logits, *state),
        dtypes="iiifiiffiifi",
        units=len(rows),
    )


def _in_fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _compiles_activation(x: Tensor, kind: Activation, features: int) -> bool:
    """Return whether an activation is compiled; not by rows: a row keeps its bits."""
    is_slow = kind == "gelu_tanh" and features >= _LEAST_FEATURES
    return is_slow and x.dtype in _COMPILED_DTYPES and has_compiled_ops()


def _reads_blocks(qkv: Tensor, *caches: Tensor) -> bool:
    """Return whether the compiled ops of KV blocks take these tensors."""
    are_fit = all(each.dtype == qkv.dtype and each.is_contiguous() for each in caches)
    return are_fit and qkv.dtype in _COMPILED_DTYPES and has_compiled_ops()
