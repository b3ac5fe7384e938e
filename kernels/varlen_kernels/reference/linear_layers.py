"""Linear layers and activations in plain torch."""

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from varlen_kernels import Activation

__all__ = ["activate", "activate_gate", "linear", "linear_activate", "tanh"]

# Dtypes of the codes of a weight.
CODES = torch.int8, torch.float8_e4m3fn


class CodedWeight(NamedTuple):
    """A weight with codes of 8 bits, `codes · scale`; only GPUs have kernels for it.

    Attributes:
        codes: `[hidden, features]`, a dtype of `CODES`; the transpose of a contiguous tensor.
        scale: `[features]` fp32.
    """

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return self.codes.shape


LinearWeight: TypeAlias = Tensor | CodedWeight


def widened(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """Return a weight as numbers, `[hidden, features]`; codes become `dtype`."""
    if isinstance(weight, Tensor):
        return weight
    return (weight.codes.to(weight.scale.dtype) * weight.scale).to(dtype)


def linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return x @ weight + bias, `[tokens, features]`.

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden, features]`, contiguous. For few tokens, CPUs multiply by this layout faster than
            by torch's `[features, hidden]` (docs/decisions/0002-weights-in-out.md).
        bias: `[features]`.
    """
    weight = widened(weight, x.dtype)
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)


def activate(
    x: Tensor, bias: Tensor | None = None, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of x + bias: exact (erf) GELU, its tanh form, ReLU or SiLU.

    Args:
        x: `[tokens, features]`.
        bias: `[features]`.
    """
    if bias is not None:
        x = torch.add(x, bias, out=out)
    if kind == "relu":
        return torch.clamp_min(x, 0, out=out)
    if kind == "silu":
        return F.silu(x) if out is None else torch.ops.aten.silu.out(x, out=out)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    if out is None:
        return F.gelu(x, approximate=approximate)
    return torch.ops.aten.gelu.out(x, approximate=approximate, out=out)  # type: ignore[no-any-return]


def linear_activate(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    kind: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return the activation of x @ weight + bias, `[tokens, features]`; see `linear` and `activate`."""
    product = linear(x, weight, bias, out=out)
    return activate(product, kind=kind, out=product)


def activate_gate(x: Tensor, *, kind: Activation, out: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up, `[tokens, features]`.

    Args:
        x: `[tokens, 2 · features]`: the gate of each token, then its up.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = x.chunk(2, dim=1)
    return torch.mul(activate(gate, kind=kind), up, out=out)


def tanh(x: Tensor, *, limit: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return the hyperbolic tangent of each element, stretched along both axes.

    Args:
        limit: the result is limit · tanh(x / limit).
    """
    if limit == 1.0:
        return torch.tanh(x, out=out)
    return torch.div(x, limit, out=out).tanh_().mul_(limit)
