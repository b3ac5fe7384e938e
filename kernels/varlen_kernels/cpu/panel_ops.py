"""Linear layers of CPUs whose weights are in panels.

Names and signatures match `reference`, with the layout of the weight added.
"""

from typing import NamedTuple

from torch import Tensor

from varlen_kernels import Activation


class PanelWeight(NamedTuple):
    """The weight of a linear layer for `linear_panels`.

    Attributes:
        panels: `[panels, hidden * features of a panel]`, made by `pack_panels`.
        features: number of output features.
    """

    panels: Tensor
    features: int


def pack_panels(weight: Tensor) -> PanelWeight:
    """Return a weight, `[hidden, features]` fp32 or bf16, in the order in which products read it."""
    from varlen_kernels.cpu.bodies import panel_layout

    return PanelWeight(panel_layout.pack_panels(weight), weight.shape[1])


def linear_panels(
    x: Tensor, weight: PanelWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return `linear` of a weight that `pack_panels` made, `[tokens, features]`."""
    from varlen_kernels.cpu.calls.calls import run_op

    out = x.new_empty(len(x), weight.features) if out is None else out
    run_op("linear_panels", (x, weight, bias), [out])
    return out


def linear_panels_activate(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None = None,
    *,
    kind: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return the activation of `linear_panels`."""
    from varlen_kernels.cpu.calls.calls import run_op

    out = x.new_empty(len(x), weight.features) if out is None else out
    run_op("linear_panels_activate", (x, weight, bias), [out], kind=kind)
    return out
