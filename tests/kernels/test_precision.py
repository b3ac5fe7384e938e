"""Matrix products on a GPU are summed in fp32."""

import pytest
import torch

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from varlen_kernels import fused


def test_no_product_of_a_gpu_is_summed_in_half_precision():
    assert fused.linear
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
