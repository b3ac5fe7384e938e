"""Weights of terms on a GPU or in the interpreter, against the reference."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.reference.vocabulary import SLICE_TERMS
from varlen_kernels.triton.pooling import term_weights

from .compare import assert_close, cu_seqlens_of, rand

LENGTHS = [3, 0, 1, 65]


@pytest.mark.parametrize("mode", ["max", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("terms", [50, SLICE_TERMS + 5])
def test_matches_the_reference(terms, dtype, mode, device):
    # the graph of a batch has room for more tokens
    x = rand(sum(LENGTHS) + 3, 12, dtype=dtype, device=device)
    table = rand(terms, 12, dtype=dtype, device=device, seed=1)
    bias = rand(terms, dtype=dtype, device=device, seed=2)
    bounds = cu_seqlens_of(LENGTHS, device)

    weights, _ = term_weights(x, table.t(), bias, bounds, mode=mode, logs=2)

    expected, _ = reference.term_weights(x, table.t(), bias, bounds, mode=mode, logs=2)
    # a product on a GPU may round otherwise than the reference's
    assert_close(weights, expected, torch.float32, 10 if dtype == torch.float32 else 1e4)


@pytest.mark.parametrize(
    "out, message",
    [((4, 49), "must be \\[4, 50\\] torch.float32"), ((3, 50), "must be \\[4, 50\\]")],
)
def test_refuses_results_of_another_shape(out, message, device):
    x, weight = rand(69, 12, device=device), rand(12, 50, device=device)
    bounds = cu_seqlens_of(LENGTHS, device)
    results = torch.empty(out, device=device), torch.empty(69, 50, device=device)

    with pytest.raises(ValueError, match=message):
        term_weights(x, weight, None, bounds, mode="max", out=results)
