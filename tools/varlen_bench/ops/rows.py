"""Calls of the row-wise ops: norms, softmax, activations and embeddings, at the widths of served models."""

from functools import partial
from typing import get_args

import torch
from torch import Tensor

from varlen_bench.ops.call import Call
from varlen_kernels import Activation, fused

_TOKENS = 64
_EPS = 1e-5


def _add_layer_norm(hidden: int, dtype: torch.dtype) -> Tensor:
    x, vector = torch.zeros(_TOKENS, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    return fused.add_layer_norm(x, x, vector, vector, eps=_EPS, x_bias=vector)


def _rms_norm(hidden: int, dtype: torch.dtype) -> Tensor:
    x, weight = torch.zeros(_TOKENS, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    return fused.rms_norm(x, weight, eps=_EPS, residual=x, sum_out=x)


def _embed_layer_norm(hidden: int, dtype: torch.dtype) -> Tensor:
    ids = torch.zeros(_TOKENS, dtype=torch.int32)
    table, vector = torch.zeros(_TOKENS, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    return fused.embed_layer_norm(ids, ids, ids, table, table, table, vector, vector, eps=_EPS)


def _masked_softmax(
    keys: int, dtype: torch.dtype, *, queries: int = 16, causal: bool = False
) -> Tensor:
    x = torch.zeros(2, 16, queries, keys, dtype=dtype)
    seqlens = torch.zeros(2, dtype=torch.int32)
    return fused.masked_softmax(x, seqlens, scale=1.0, causal=causal)


def _activate(features: int, kind: Activation, dtype: torch.dtype) -> Tensor:
    x, bias = torch.zeros(_TOKENS, features, dtype=dtype), torch.zeros(features, dtype=dtype)
    return fused.activate(x, bias, kind=kind)


def _silu_gate(features: int, dtype: torch.dtype) -> Tensor:
    return fused.silu_gate(torch.zeros(_TOKENS, 2 * features, dtype=dtype))


# fp16 takes the loads and registers of bf16; one width shows it
_TWO = (torch.float32, torch.bfloat16)

CALLS = [
    # BERT-base, MiniLM, the widest, and one that allows no vectors
    Call("add_layer_norm-768", partial(_add_layer_norm, 768), narrow_loads=0),
    Call("add_layer_norm-384", partial(_add_layer_norm, 384), _TWO, narrow_loads=0),
    Call("add_layer_norm-16384", partial(_add_layer_norm, 16_384), _TWO, narrow_loads=0),
    Call("add_layer_norm-501", partial(_add_layer_norm, 501), _TWO),
    Call("rms_norm-768", partial(_rms_norm, 768), _TWO, narrow_loads=0),
    Call("rms_norm-4096", partial(_rms_norm, 4096), _TWO, narrow_loads=0),
    # three loads of ids for each row of a lane
    Call("embed_layer_norm-768", partial(_embed_layer_norm, 768), _TWO, narrow_loads=3),
    Call("embed_layer_norm-384", partial(_embed_layer_norm, 384), _TWO, narrow_loads=6),
    # one load of a length; 10 and 500 keys allow vectors of 2 and 4
    Call("masked_softmax-10", partial(_masked_softmax, 10), _TWO),
    Call("masked_softmax-80", partial(_masked_softmax, 80), _TWO, narrow_loads=1),
    Call("masked_softmax-500", partial(_masked_softmax, 500)),
    Call("masked_softmax-501", partial(_masked_softmax, 501), _TWO),
    Call("masked_softmax-4096", partial(_masked_softmax, 4096), _TWO, narrow_loads=1),
    Call("masked_softmax-16384", partial(_masked_softmax, 16_384), _TWO, narrow_loads=2),
    Call(
        "masked_softmax-large_causal",
        partial(_masked_softmax, 1024, queries=1024, causal=True),
        _TWO,
        narrow_loads=1,
    ),
    *(
        Call(f"activate-{kind}", partial(_activate, 3072, kind), _TWO, narrow_loads=0)
        for kind in get_args(Activation)
    ),
    Call("silu_gate-3072", partial(_silu_gate, 3072), _TWO, narrow_loads=0),
]
