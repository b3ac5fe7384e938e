"""Calls of the ops that look at whole sequences: attention, pooling, and the way between packed and padded."""

from functools import partial

import torch
from torch import Tensor

from varlen_bench.ops.call import Call
from varlen_kernels import Pooling
from varlen_kernels.attention_varlen import attention_varlen
from varlen_kernels.packing import pack, unpack
from varlen_kernels.pooling import first_tokens, pool

_HEADS = 12
_BATCH = 4


def _cu_seqlens(length: int) -> Tensor:
    return torch.arange(_BATCH + 1, dtype=torch.int32) * length


def _attention(
    head_dim: int,
    dtype: torch.dtype,
    *,
    length: int = 64,
    causal: bool = False,
    biased: bool = False,
) -> Tensor:
    qkv = torch.zeros(_BATCH * length, 3 * _HEADS * head_dim, dtype=dtype)
    bias = torch.zeros(_HEADS, 2 * length - 1) if biased else None
    return attention_varlen(
        qkv,
        _cu_seqlens(length),
        num_heads=_HEADS,
        scale=head_dim**-0.5,
        causal=causal,
        distance_bias=bias,
    )


def _pool(hidden: int, mode: Pooling, dtype: torch.dtype, *, normalized: bool = True) -> Tensor:
    normalize = torch.ones(_BATCH, dtype=torch.bool) if normalized else None
    x = torch.zeros(_BATCH * 16, hidden, dtype=dtype)
    return pool(x, _cu_seqlens(16), normalize, mode=mode)


def _first_tokens(hidden: int, dtype: torch.dtype) -> Tensor:
    return first_tokens(torch.zeros(_BATCH * 16, hidden, dtype=dtype), _cu_seqlens(16))


def _unpack(hidden: int, dtype: torch.dtype) -> Tensor:
    x = torch.zeros(_BATCH * 16, hidden, dtype=dtype)
    return unpack(x, _cu_seqlens(16), max_seqlen=16)


def _pack(hidden: int, dtype: torch.dtype) -> Tensor:
    x = torch.zeros(_BATCH, 16, hidden, dtype=dtype)
    return pack(x, _cu_seqlens(16), tokens=_BATCH * 16)


_TWO = (torch.float32, torch.bfloat16)
_BFLOAT16 = (torch.bfloat16,)
# Loads under 128 bits: of cu_seqlens, whose vectors start at odd places, by how many warps share them; and of a
# bias, one for each score.
_STARTS = 8

CALLS = [
    Call("attention_varlen-64", partial(_attention, 64), narrow_loads=_STARTS, tensor_cores=True),
    Call(
        "attention_varlen-64_long",
        partial(_attention, 64, length=256),
        _TWO,
        narrow_loads=_STARTS,
        tensor_cores=True,
    ),
    # tiles of fewer than 64 queries, which wgmma does not take
    Call("attention_varlen-64_short", partial(_attention, 64, length=16), _TWO),
    Call("attention_varlen-64_shortest", partial(_attention, 64, length=4), _BFLOAT16),
    Call(
        "attention_varlen-64_causal",
        partial(_attention, 64, causal=True),
        _TWO,
        narrow_loads=_STARTS,
        tensor_cores=True,
    ),
    Call(
        "attention_varlen-64_biased",
        partial(_attention, 64, causal=True, biased=True),
        _TWO,
        tensor_cores=True,
    ),
    *(
        Call(
            f"attention_varlen-{head_dim}",
            partial(_attention, head_dim),
            _TWO,
            narrow_loads=_STARTS,
            tensor_cores=True,
        )
        for head_dim in (32, 96, 128, 256)
    ),
    Call("attention_varlen-80", partial(_attention, 80), _BFLOAT16, tensor_cores=True),
    # two of cu_seqlens, and the flag
    Call("pool-mean", partial(_pool, 768, "mean"), _TWO, narrow_loads=3),
    Call("pool-max", partial(_pool, 384, "max"), _TWO, narrow_loads=3),
    Call("pool-cls", partial(_pool, 768, "cls", normalized=False), _TWO, narrow_loads=2),
    Call("pool-widest", partial(_pool, 16_384, "mean"), _TWO, narrow_loads=3),
    Call("pool-501", partial(_pool, 501, "max"), _BFLOAT16),
    Call("first_tokens-768", partial(_first_tokens, 768), _TWO, narrow_loads=2),
    Call("unpack-768", partial(_unpack, 768), _TWO, narrow_loads=2),
    Call("pack-768", partial(_pack, 768), _TWO, narrow_loads=2),
]
