"""The masked softmax in plain torch, against float64 arithmetic written out in numpy."""

import numpy as np
import pytest
import torch

from tests.kernels.float64 import DTYPES, check, f64, rand
from varlen_kernels import reference


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


@DTYPES
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
def test_a_poisoned_out_is_fully_overwritten_with_the_same_bits(in_place, dtype):
    scores, seqlens = rand(2, 3, 6, 6, dtype=dtype, seed=1), torch.tensor([6, 4]).int()
    fresh = reference.masked_softmax(scores, seqlens, scale=0.5, causal=True)
    out = torch.full_like(fresh, torch.nan)

    x = out.copy_(scores) if in_place else scores
    returned = reference.masked_softmax(x, seqlens, scale=0.5, causal=True, out=out)

    assert returned is out
    assert torch.equal(out, fresh)
