"""Matrix products of CPUs whose weights compiled code does not read: torch and oneDNN."""

from functools import cache

import torch
from torch import Tensor

from varlen_kernels import Activation, reference
from varlen_kernels.cpu.calls.calls import compiled_form
from varlen_kernels.op_table import OPS
from varlen_kernels.reference.linear_layers import LinearWeight

# Elements of a weight that are fp32 at one time: 4 MiB, which stay in the cache until they are multiplied.
_TILE_ELEMENTS = 1 << 20

_activate = compiled_form(OPS["activate"])


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
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return `linear` of a weight that `pack_weight` made, `[tokens, features]`."""
    assert isinstance(weight, Tensor)
    if not len(x):
        return x.new_empty(0, weight.shape[0]) if out is None else out
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product if out is None else out.copy_(product)


def linear_widened(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return `linear` of 16-bit operands, multiplied and summed in fp32."""
    assert isinstance(weight, Tensor)
    hidden, features = weight.shape
    if out is None:
        out = x.new_empty(len(x), features)
    rows, step = x.float(), max(1, _TILE_ELEMENTS // hidden)
    for begin in range(0, features, step):
        part = slice(begin, begin + step)
        product = torch.mm(rows, weight[:, part].float())
        if bias is not None:
            product += bias[part]
        out[:, part] = product
    return out


def linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return `reference.linear`, widened where oneDNN does not multiply bf16."""
    is_slow = x.dtype == torch.bfloat16 and not can_pack(torch.bfloat16)
    return (linear_widened if is_slow else reference.linear)(x, weight, bias, out=out)


def linear_activate(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    kind: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return the activation of `linear`."""
    product = linear(x, weight, bias, out=out)
    activated: Tensor = _activate(product, kind=kind, out=product)
    return activated
