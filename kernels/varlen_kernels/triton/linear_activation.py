"""A linear layer and its activation, in one matrix product if its epilogue can.

Otherwise the activation is a second step. cuBLASLt computes ReLU and the tanh form of GELU on results that are still in
registers, which saves reading and writing them once more. Its GELU has no exact (erf) form.
"""

import torch
from torch import Tensor

from varlen_kernels import IN_EPILOGUE, Activation
from varlen_kernels.reference import linear
from varlen_kernels.triton.activation import activate


def linear_activate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return the activation of x @ weight + bias, see `reference.linear_activate`.

    Raises:
        ValueError: shapes or dtypes disagree, or rows are not contiguous.
    """
    # on a CPU, torch's product computes the exact GELU
    if not x.is_cuda or bias is None or kind not in IN_EPILOGUE:
        product = linear(x, weight, bias, out=out)
        return activate(product, kind=kind, out=product)
    if out is None:
        out = x.new_empty(len(x), weight.shape[1])
    torch.ops.aten._addmm_activation.out(bias, x, weight, use_gelu=kind == "gelu_tanh", out=out)
    return out
