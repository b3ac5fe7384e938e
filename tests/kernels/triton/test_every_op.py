"""Every op at the shape of BERT-base, against float64."""

import pytest
import torch

from varlen_bench.ops.any_batch import ANY_BATCH
from varlen_bench.ops.call import kernels
from varlen_bench.ops.sequences import attention_varlen

from .compare import DTYPES


@DTYPES
@pytest.mark.parametrize("op", ANY_BATCH)
def test_an_op_is_right_on_a_batch_of_several_lengths(op, dtype, device):
    call = ANY_BATCH[op]([17, 1, 40], dtype)
    # tensors for results hold NaN
    inputs = call.make(device, seed=0)
    exact = call.exact(inputs)
    call.prepare(kernels("fused"), inputs)

    result = call.run(kernels("fused"), inputs)

    assert call.error(result, inputs, exact) <= call.max_error


@pytest.mark.parametrize("kind", ["causal", "biased", "by_distance"])
def test_attention_of_every_form_is_right(kind, device):
    call = attention_varlen([17, 1, 40], 12, 64, torch.float32, **{kind: True})
    inputs = call.make(device, seed=0)

    result = call.run(kernels("fused"), inputs)

    assert call.error(result, inputs, call.exact(inputs)) <= call.max_error
