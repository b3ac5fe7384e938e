"""Linear layers of CPUs whose weights are codes, see `bodies.int8_panels`."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from varlen_kernels.cpu.bodies.int8_layout import pack_halves, pack_panels, panel_levels
from varlen_kernels.reference.linear_int8 import Int8Weight, WeightCodes, quantize_weight


@dataclass(frozen=True, slots=True)
class Int8Product:
    """A linear layer in int8 on this CPU.

    Attributes:
        levels: largest code of a token that never saturates.
    """

    kernel: Literal["linear_int8_panels", "linear_int4_panels"]
    levels: int

    def quantize(
        self,
        weight: Tensor,
        bias: Tensor | None,
        outliers: Tensor,
        chosen: WeightCodes | None = None,
    ) -> Int8Weight:
        """Return `quantize_weight`, with its codes in the layout that the op reads."""
        layer = quantize_weight(weight, bias, outliers, self.levels, chosen)
        pack = pack_panels if self.kernel == "linear_int8_panels" else pack_halves
        return layer._replace(codes=pack(layer.codes))


def int8_product(bits: Literal[4, 8]) -> Int8Product:
    """Return the linear layer with weights of this number of bits."""
    return Int8Product("linear_int8_panels" if bits == 8 else "linear_int4_panels", panel_levels())
