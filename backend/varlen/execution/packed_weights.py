"""Packs the weights of linear layers for oneDNN, the fastest way to multiply few rows.

docs/decisions/0019-cpu-decoding.md has measurements.
"""

from dataclasses import replace

from torch import Tensor

from varlen.program.program import Op, Program
from varlen_kernels.cpu import pack_weight


def pack_linear_layers(program: Program) -> Program:
    """Return the program with packed weights.

    It holds no reference to weights that only linear layers read.
    """
    packed: dict[int, Tensor] = {}
    return Program([_pack(op, packed) for op in program.ops], program.outputs)


def _pack(op: Op, packed: dict[int, Tensor]) -> Op:
    if op.kernel != "linear":
        return op
    x, weight, bias = op.operands
    assert isinstance(weight, Tensor)
    if id(weight) not in packed:
        packed[id(weight)] = pack_weight(weight)
    return replace(op, kernel="linear_packed", operands=(x, packed[id(weight)], bias))
