"""The padded ops in plain torch, against float64 arithmetic written out in numpy."""

from inspect import signature

import numpy as np
import pytest
import torch

from varlen_bench.padded import reference

from .float64 import DTYPES, assert_out_is_overwritten, bounds_of, f64, rand


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
    x = rand(18, 12, dtype=dtype)
    padded = rand(len(lengths), 5, 12, dtype=dtype, seed=2)
    bounds = bounds_of(lengths)
    return {
        "unpack": lambda out: reference.unpack(x, bounds, max_seqlen=5, out=out),
        "pack": lambda out: reference.pack(padded, bounds, tokens=18, out=out),
    }


@DTYPES
@pytest.mark.parametrize("op", calls(torch.float32))
def test_a_poisoned_out_is_fully_overwritten_with_the_same_bits(op, dtype):
    assert_out_is_overwritten(calls(dtype)[op])


@pytest.mark.parametrize("op", ["pack", "unpack"])
def test_a_padded_op_has_the_signature_of_its_reference(op):
    fused = pytest.importorskip("varlen_bench.padded.fused", reason="needs triton")

    assert signature(getattr(fused, op)) == signature(getattr(reference, op))
