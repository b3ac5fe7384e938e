"""Codes of weights for a GPU."""

import pytest
import torch

from varlen.execution.int8.calibration import coded_weight
from varlen_kernels.reference.linear_layers import widened


@pytest.mark.parametrize(("codes", "largest", "error"), [("int8", 127, 0.01), ("fp8", 448, 0.035)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("by_output", [True, False])
def test_the_nearest_codes_use_all_numbers_of_each_feature(codes, largest, error, dtype, by_output):
    weight = torch.randn(96, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:, 3] = 0
    weight = weight.t().contiguous().t() if by_output else weight
    before = weight.clone()

    found = coded_weight(weight, codes)

    assert torch.equal(weight, before)
    assert found.codes.t().is_contiguous()
    assert found.codes.itemsize == 1
    most = found.codes.float().abs().amax(0)
    assert most[3] == 0
    assert (most[torch.arange(40) != 3] == largest).all()
    lost = widened(found, torch.float32) - before.float()
    assert lost.norm() < error * before.float().norm()
