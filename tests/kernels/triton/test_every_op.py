"""Every op at the shape of BERT-base, against float64."""

import pytest
import torch

from varlen_bench.ops.any_batch import ANY_BATCH
from varlen_bench.ops.call import kernels
from varlen_bench.ops.sequences import attention_varlen

from .compare import DTYPES

pytestmark = pytest.mark.full


@DTYPES
@pytest.mark.parametrize("op", ANY_BATCH)
def test_an_op_is_right_on_a_batch_of_several_lengths(op, dtype, device):
    call = ANY_BATCH[op]([17, 1, 40], dtype)

    # tensors for results hold NaN
    assert call.error_of(kernels("fused"), device, seed=0) <= call.max_error


@pytest.mark.parametrize("kind", ["causal", "biased", "by_distance"])
def test_attention_of_every_form_is_right(kind, device):
    call = attention_varlen([17, 1, 40], 12, 64, torch.float32, **{kind: True})

    assert call.error_of(kernels("fused"), device, seed=0) <= call.max_error
