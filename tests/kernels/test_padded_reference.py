"""The padded ops in plain torch, against float64 arithmetic written out in numpy."""

from inspect import signature

import numpy as np
import pytest
import torch

from varlen_bench.padded import reference

from .float64 import DTYPES, bounds_of, check, f64, rand


def softmax64(x, seqlens, scale, causal):
    """Row by row, only over the keys that may be read."""
    batch, _, queries, keys = x.shape
    out = np.zeros_like(x)
    for i in range(batch):
        for query in range(queries):
            last = query + keys - queries if causal else keys - 1
            readable = max(0, min(int(seqlens[i]), last + 1))
            scores = x[i, :, query, :readable] * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
            out[i, :, query, :readable] = weights / weights.sum(axis=1, keepdims=True)
    return out


@DTYPES
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("queries, keys", [(1, 1), (3, 5), (5, 3), (63, 63), (2, 501)], ids=str)
def test_masked_softmax_matches_float64(queries, keys, causal, dtype):
    x = 4 * rand(4, 2, queries, keys, dtype=dtype)
    seqlens = torch.tensor([keys, 0, 1, keys // 2], dtype=torch.int32)

    actual = reference.masked_softmax(x, seqlens, scale=0.4, causal=causal)

    check(actual, softmax64(f64(x), seqlens, 0.4, causal), dtype)
    assert actual.dtype == dtype


def test_masked_softmax_never_reads_padding():
    x, seqlens = rand(2, 1, 3, 8), torch.tensor([5, 0], dtype=torch.int32)
    fresh = reference.masked_softmax(x, seqlens, scale=1.0)
    x[0, ..., 5:] = torch.nan
    x[1] = torch.inf

    assert torch.equal(reference.masked_softmax(x, seqlens, scale=1.0), fresh)


def padded64(x, lengths, max_seqlen):
    out = np.zeros((len(lengths), max_seqlen, x.shape[1]))
    ends = np.cumsum(lengths)
    for row, begin, end in zip(out, ends - lengths, ends, strict=True):
        row[: end - begin] = x[begin:end]
    return out


@DTYPES
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("lengths", [[1], [0], [5, 1, 5, 0, 2], [0, 63, 0], [3, 3]], ids=str)
def test_unpack_puts_each_sequence_in_a_row_and_pack_takes_it_out(lengths, extra, dtype):
    x = rand(sum(lengths), 33, dtype=dtype)
    bounds, max_seqlen = bounds_of(lengths), max(lengths) + extra

    padded = reference.unpack(x, bounds, max_seqlen=max_seqlen)
    packed = reference.pack(padded, bounds, tokens=len(x))

    assert padded.dtype == dtype
    np.testing.assert_array_equal(f64(padded), padded64(f64(x), lengths, max_seqlen))
    assert packed.dtype == dtype
    assert torch.equal(packed, x)


def calls(dtype):
    """Return, by op, a call that takes `out`."""
    lengths = [5, 1, 5, 0, 5, 2]
    x, scores = rand(18, 12, dtype=dtype), rand(2, 3, 6, 6, dtype=dtype, seed=1)
    padded = rand(len(lengths), 5, 12, dtype=dtype, seed=2)
    bounds, seqlens = bounds_of(lengths), torch.tensor([6, 4], dtype=torch.int32)
    return {
        "masked_softmax": lambda out: reference.masked_softmax(
            scores, seqlens, scale=0.5, causal=True, out=out
        ),
        "masked_softmax_in_place": lambda out: reference.masked_softmax(
            scores if out is None else out.copy_(scores), seqlens, scale=0.5, causal=True, out=out
        ),
        "unpack": lambda out: reference.unpack(x, bounds, max_seqlen=5, out=out),
        "pack": lambda out: reference.pack(padded, bounds, tokens=18, out=out),
    }


@DTYPES
@pytest.mark.parametrize("op", calls(torch.float32))
def test_a_poisoned_out_is_fully_overwritten_with_the_same_bits(op, dtype):
    call = calls(dtype)[op]
    fresh = call(None)
    out = torch.full_like(fresh, torch.nan)

    returned = call(out)

    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, fresh)


@pytest.mark.parametrize("op", ["masked_softmax", "pack", "unpack"])
def test_a_padded_op_has_the_signature_of_its_reference(op):
    fused = pytest.importorskip("varlen_bench.padded.fused", reason="needs triton")

    assert signature(getattr(fused, op)) == signature(getattr(reference, op))
