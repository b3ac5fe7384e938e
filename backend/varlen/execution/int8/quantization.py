"""Linear layers of a program in int8: the same ops with quantized weights.

docs/operating/int8.md describes the arithmetic and its quality.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from torch import Tensor

from varlen.execution.cpu.linear_paths import fuse_layers
from varlen.program.program import Op, Program
from varlen_kernels import cpu
from varlen_kernels.reference.linear_int8 import OUTLIERS, Int8Weight, WeightCodes

if TYPE_CHECKING:
    from varlen_kernels.cpu.int8_products import Int8Product

# Bits of a code of a weight. The codes of a token have as many as the CPU multiplies exactly.
WeightBits: TypeAlias = Literal[8, 4]
# By the setting `dtype`.
BITS: Mapping[str, WeightBits] = {"int8": 8, "int4": 4}

# Ops of linear layers as they are recorded.
LINEAR = "linear", "linear_activate"

# Ids of a layer's weight and bias.
LayerKey: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A linear layer in int8, for the product that is fastest on this CPU.

    Attributes:
        weight: the op's operand after the input.
    """

    kernel: str
    weight: Int8Weight

    def run(self, x: Tensor) -> Tensor:
        """Return its output, `[tokens, features]` fp32, for `[tokens, hidden]` fp32."""
        result: Tensor = getattr(cpu, self.kernel)(x, self.weight)
        return result


class LayerCodes(NamedTuple):
    """The codes of a linear layer's weight.

    Attributes:
        outliers: `[OUTLIERS]` int64, ascending columns of its input that stay in fp32.
    """

    outliers: Tensor
    chosen: WeightCodes


def layer_key(weight: object, bias: object) -> LayerKey:
    """Return the key of a linear layer; layers may share a weight."""
    return id(weight), id(bias)


def linear_weights(programs: Sequence[Program]) -> dict[LayerKey, tuple[Tensor, Tensor | None]]:
    """Return weight and bias of linear layers, in order."""
    layers = {}
    for op in (op for program in programs for op in program.ops):
        if op.kernel in LINEAR:
            _, weight, bias = op.operands
            assert isinstance(weight, Tensor)
            assert bias is None or isinstance(bias, Tensor)
            # besides its outliers, a token needs one more column
            if weight.shape[0] > OUTLIERS:
                layers[layer_key(weight, bias)] = weight, bias
    return layers


def quantize_layers(
    programs: Sequence[Program], codes: Mapping[LayerKey, LayerCodes], bits: WeightBits = 8
) -> dict[LayerKey, QuantizedLayer]:
    """Return the int8 form of linear layers."""
    product, layers = product_of(bits), linear_weights(programs)
    return {
        key: QuantizedLayer(product.kernel, product.quantize(*layers[key], *chosen))
        for key, chosen in codes.items()
    }


def product_of(bits: WeightBits) -> "Int8Product":
    """Return the linear layer that runs weights with codes of this number of bits.

    Raises:
        NoInt8ProductError: this CPU has none.
    """
    from varlen_kernels.cpu import int8_products

    return int8_products.choose_product() if bits == 8 else int8_products.int4_product()


def use_int8(program: Program, layers: Mapping[LayerKey, QuantizedLayer]) -> Program:
    """Return the program with int8 layers, without the weights that they replace.

    Where the CPU's op can also do what follows a layer, it does. Where the CPU multiplies bf16, attention does too, if
    any layer is in int8.
    """
    # its layout asks LLVM for the CPU, which a machine with a GPU may lack
    from varlen_kernels.cpu.bodies.panel_layout import HAS_PAIRS

    def replaced(op: Op) -> Op:
        if HAS_PAIRS and layers and op.kernel == "attention_varlen":
            return replace(op, kernel="attention_rounded")
        layer = layers.get(layer_key(*op.operands[1:])) if op.kernel == "linear" else None
        if layer is None:
            return op
        return replace(op, kernel=layer.kernel, operands=(op.operands[0], layer.weight))

    return fuse_layers(Program([replaced(op) for op in program.ops], program.outputs))
