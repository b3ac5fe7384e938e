"""Matrix products of oneDNN on CPUs, whose weights are packed in advance."""

from functools import cache

import torch
from torch import Tensor


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight in the layout that oneDNN reads fastest, for `linear_packed`.

    Args:
        weight: `[hidden, features]`, as `linear` takes it, of a dtype that `can_pack` allows.
    """
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous())
    return packed


def linear_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return `linear` of a weight that `pack_weight` made, `[tokens, features]`."""
    if not len(x):
        return x.new_empty(0, weight.shape[0]) if out is None else out
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product if out is None else out.copy_(product)
