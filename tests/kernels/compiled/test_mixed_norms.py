"""Norms of bf16 rows with fp32 weights, as in front of a classifier."""

import pytest
import torch

from varlen_bench.dry_run import dry_run
from varlen_bench.inspect_kernels import ARCHES
from varlen_bench.machine_code import read_machine_code
from varlen_kernels.triton.norms import add_layer_norm, residual_layer_norm, residual_rms_norm


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "norm", [add_layer_norm, residual_layer_norm, residual_rms_norm], ids=lambda norm: norm.__name__
)
def test_no_register_spills(norm, arch):
    x, weight = torch.empty(64, 768, dtype=torch.bfloat16), torch.empty(768)
    vectors = [weight] if norm is residual_rms_norm else [weight, weight]

    with dry_run(arch) as compiled:
        norm(x, x, *vectors, eps=1e-6)

    assert [read_machine_code(each).stack_bytes for each in compiled] == [0]
