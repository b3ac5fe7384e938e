"""Linear layers of a program in int8: the same ops with quantized weights.

docs/operating/int8.md describes the arithmetic and its quality. On a GPU, weights in codes of 8 bits are loaded into
memory of the host, and codes are made on the GPU, layer by layer: it holds a byte of each.
docs/decisions/0128-codes-on-a-gpu.md has the reasons.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from varlen.execution.cpu.linear_paths import fuse_layers
from varlen.program.program import Op, Operand, Program
from varlen_kernels import cpu
from varlen_kernels.reference.linear_int8 import (
    OUTLIERS,
    SMALLEST_SCALE,
    Int8Weight,
    WeightCodes,
    nearest_codes,
)
from varlen_kernels.reference.linear_layers import CodedWeight, LinearWeight

if TYPE_CHECKING:
    from varlen_kernels.cpu.int8_products import Int8Product

_log = logging.getLogger(__name__)

# Bits of a code of a weight. The codes of a token have as many as the CPU multiplies exactly.
WeightBits: TypeAlias = Literal[8, 4]
# By the setting `dtype`.
BITS: Mapping[str, WeightBits] = {"int8": 8, "int4": 4}

# Ops of linear layers as they are recorded.
LINEAR = "linear", "linear_activate"

# Ids of a layer's weight and bias.
LayerKey: TypeAlias = tuple[int, int]
# Form of codes.
Codes: TypeAlias = Literal["int8", "fp8"]
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


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


def coded_weight(weight: Tensor, codes: Codes) -> CodedWeight:
    """Return the nearest codes of a weight, `[hidden, features]`, with a scale for each feature.

    The largest weight of a feature has the largest code.
    """
    exact = weight.t().float().contiguous().t()
    if codes == "int8":
        scale, found = nearest_codes(exact, torch.empty(0, dtype=torch.int64, device=exact.device))
        return CodedWeight(found, scale)
    scale = (exact.abs().amax(0) / _LARGEST_FP8).clamp_min_(SMALLEST_SCALE)
    # rounding may leave more than the largest number
    found = (exact / scale).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    return CodedWeight(found, scale)


def to_codes(
    programs: Sequence[Program], codes: Codes, device: torch.device
) -> tuple[Program, ...]:
    """Return programs on a GPU with linear layers in codes; weights in fp32 stay.

    Args:
        programs: programs with weights in memory of the host.
    """
    # shared weights stay shared
    moved: dict[int, Any] = {}

    def move(operand: Any) -> Any:
        if isinstance(operand, tuple):
            return type(operand)(*map(move, operand))
        if not isinstance(operand, Tensor):
            return operand
        if id(operand) not in moved:
            moved[id(operand)] = operand.to(device)
        return moved[id(operand)]

    weights = {id(weight): weight for weight, _ in linear_weights(programs).values()}
    coded = {
        key: coded_weight(weight.to(device), codes)
        for key, weight in weights.items()
        if weight.itemsize == 2  # bytes
    }
    _log.info("%s: codes for the weights of %d linear layers", codes, len(coded))
    return tuple(use_codes(each, coded, move) for each in programs)


def use_codes(
    program: Program, coded: Mapping[int, LinearWeight], move: Callable[[Any], Any] = lambda x: x
) -> Program:
    """Return a program with other weights by id, and operands as `move` returns them."""

    def replaced(op: Op) -> Op:
        operands: list[Operand] = [*op.operands]
        if op.kernel in LINEAR:
            operands[1] = coded.get(id(operands[1]), operands[1])
        return replace(op, operands=tuple(map(move, operands)))

    return Program([replaced(op) for op in program.ops], program.outputs)
