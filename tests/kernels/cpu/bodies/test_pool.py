"""Compiled vectors of sequences are the ones of the specification."""

from typing import get_args

import pytest
import torch

from tests.kernels.float64 import rand
from varlen_kernels import Pooling, cpu, reference
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="pooling is compiled")
LENGTHS = [0, 1, 5, 0, 17]
# cu_seqlens of them, and tokens of no sequence behind
BOUNDS = torch.tensor([0, 0, 1, 6, 6, 23], dtype=torch.int32)
TOKENS = 26
SKIPPED = torch.tensor([0, 1, 2, 1, 0], dtype=torch.int32)
ROWS = torch.arange(23, dtype=torch.int32).flip(0) + 2
CHOSEN = torch.tensor([True, True, False, True, True])


@pytest.mark.parametrize("hidden", [1, 48, 100])
@pytest.mark.parametrize("mode", get_args(Pooling))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_vectors_are_those_of_the_specification(mode, hidden, dtype):
    x = rand(TOKENS, hidden).to(dtype)

    for normalize in (None, CHOSEN):
        for skipped in (None, SKIPPED):
            for rows in (None, ROWS[:0], ROWS):
                operands = normalize, skipped, rows
                actual = cpu.pool(x, BOUNDS, *operands, mode=mode)
                # 16-bit sums of the specification are fp32 too
                expected = reference.pool(x.float(), BOUNDS, *operands, mode=mode)
                # the maximum of no token has no direction
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_vector_does_not_depend_on_its_batch():
    x = rand(TOKENS, 100)

    for mode in get_args(Pooling):
        together = cpu.pool(x, BOUNDS, CHOSEN, mode=mode)
        alone = cpu.pool(x[6:], torch.tensor([0, 17], dtype=torch.int32), CHOSEN[4:], mode=mode)
        assert torch.equal(together[4:], alone)


def test_the_length_of_a_huge_vector_does_not_overflow():
    x = torch.full((2, 24), 2.0**70)

    actual = cpu.pool(x, BOUNDS[:1].repeat(2) + torch.tensor([0, 2]).int(), CHOSEN[:1], mode="mean")

    torch.testing.assert_close(actual, torch.full((1, 24), 24**-0.5))
