"""Every op of `fused` that is a kernel, ready to be called for a batch of any lengths, at the shape of BERT-base.

What varies from batch to batch in a server varies here; what a model fixes is fixed. The tensors are
made once, so that a call costs what its launcher costs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import torch

from varlen_kernels import fused

HIDDEN = 768
HEADS = 12
FEATURES = 3072
VOCABULARY = 1000
BEAMS = 4

Prepare: TypeAlias = Callable[[Sequence[int], torch.dtype], Callable[[], object]]


def _embed_layer_norm(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    ids = torch.zeros(sum(lengths), dtype=torch.int32)
    table = torch.zeros(VOCABULARY, HIDDEN, dtype=dtype)
    tables = (table, table[:512], table[:2])
    weight = torch.ones(HIDDEN, dtype=dtype)
    out = torch.empty(sum(lengths), HIDDEN, dtype=dtype)
    return partial(
        fused.embed_layer_norm, ids, ids, ids, *tables, weight, weight, eps=1e-12, out=out
    )


def _activate(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.zeros(sum(lengths), FEATURES, dtype=dtype)
    bias = torch.zeros(FEATURES, dtype=dtype)
    return partial(fused.activate, x, bias, kind="gelu", out=x)


def _silu_gate(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.zeros(sum(lengths), 2 * FEATURES, dtype=dtype)
    out = torch.empty(sum(lengths), FEATURES, dtype=dtype)
    return partial(fused.silu_gate, x, out=out)


def _add_layer_norm(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.zeros(sum(lengths), HIDDEN, dtype=dtype)
    weight = torch.ones(HIDDEN, dtype=dtype)
    return partial(
        fused.add_layer_norm,
        x,
        x,
        weight,
        weight,
        eps=1e-12,
        x_bias=weight,
        out=torch.empty_like(x),
    )


def _rms_norm(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.zeros(sum(lengths), HIDDEN, dtype=dtype)
    weight = torch.ones(HIDDEN, dtype=dtype)
    return partial(
        fused.rms_norm, x, weight, eps=1e-6, residual=x, sum_out=x, out=torch.empty_like(x)
    )


def _masked_softmax(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    longest = max(lengths)
    x = torch.zeros(len(lengths), HEADS, longest, longest, dtype=dtype)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    return partial(fused.masked_softmax, x, seqlens, scale=0.125, out=x)


def _attention_varlen(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    qkv = torch.zeros(sum(lengths), 3 * HIDDEN, dtype=dtype)
    out = torch.empty(sum(lengths), HIDDEN, dtype=dtype)
    return partial(
        fused.attention_varlen, qkv, _starts(lengths), num_heads=HEADS, scale=0.125, out=out
    )


def _pool(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.zeros(sum(lengths), HIDDEN, dtype=dtype)
    normalize = torch.ones(len(lengths), dtype=torch.bool)
    out = torch.empty(len(lengths), HIDDEN)
    return partial(fused.pool, x, _starts(lengths), normalize, mode="mean", out=out)


def _first_tokens(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.zeros(sum(lengths), HIDDEN, dtype=dtype)
    out = torch.empty(len(lengths), HIDDEN, dtype=dtype)
    return partial(fused.first_tokens, x, _starts(lengths), out=out)


def _unpack(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.zeros(sum(lengths), HIDDEN, dtype=dtype)
    out = torch.empty(len(lengths), max(lengths), HIDDEN, dtype=dtype)
    return partial(fused.unpack, x, _starts(lengths), max_seqlen=max(lengths), out=out)


def _pack(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.zeros(len(lengths), max(lengths), HIDDEN, dtype=dtype)
    out = torch.empty(sum(lengths), HIDDEN, dtype=dtype)
    return partial(fused.pack, x, _starts(lengths), tokens=sum(lengths), out=out)


def _beam_step(lengths: Sequence[int], dtype: torch.dtype) -> Callable[[], object]:
    logits = torch.zeros(len(lengths) * BEAMS, VOCABULARY, dtype=dtype)
    scores = torch.zeros(len(lengths), BEAMS)
    finished = torch.zeros(len(lengths), dtype=torch.bool)
    return partial(fused.beam_step, logits, scores, finished)


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


# By op: makes the tensors for sequences of these lengths, and returns the call.
ANY_BATCH: dict[str, Prepare] = {
    "embed_layer_norm": _embed_layer_norm,
    "activate": _activate,
    "silu_gate": _silu_gate,
    "add_layer_norm": _add_layer_norm,
    "rms_norm": _rms_norm,
    "masked_softmax": _masked_softmax,
    "attention_varlen": _attention_varlen,
    "pool": _pool,
    "first_tokens": _first_tokens,
    "unpack": _unpack,
    "pack": _pack,
    "beam_step": _beam_step,
}
