"""Every op at the shape of BERT-base, against float64."""

import pytest
import torch

from varlen_bench.ops.call import kernels
from varlen_bench.ops.table import TABLE, op_call

from .compare import DTYPES

pytestmark = pytest.mark.full


@DTYPES
@pytest.mark.parametrize("op", TABLE)
def test_an_op_is_right_on_a_batch_of_several_lengths(op, dtype, device):
    call = op_call(op, dtype, lengths=[17, 1, 40])

    # tensors for results hold NaN
    assert call.error_of(kernels("fused"), device, seed=0) <= call.max_error


@pytest.mark.parametrize(
    "form",
    [{"causal": True}, {"optional": "bias"}, {"optional": "distances"}],
    ids=["causal", "biased", "by_distance"],
)
def test_attention_of_every_form_is_right(form, device):
    call = op_call("attention_varlen", torch.float32, lengths=[17, 1, 40], **form)

    assert call.error_of(kernels("fused"), device, seed=0) <= call.max_error
