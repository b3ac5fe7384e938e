"""Int8 layers of a program that also run the op behind them.

That is an activation, or a residual sum with its norm.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from varlen.program.program import Op, Program, Value
from varlen_kernels.ops import IN_PLACE

# For each op of a layer: the op that runs it and what follows it, by the name of what follows.
_FUSED: Mapping[str, Mapping[str, str]] = {
    "linear_int8_panels": {
        "activate": "linear_int8_panels_activate",
        "add_layer_norm": "linear_int8_panels_add_layer_norm",
        "residual_layer_norm": "linear_int8_panels_residual_layer_norm",
        "residual_rms_norm": "linear_int8_panels_residual_rms_norm",
    }
}


def fuse_int8(program: Program) -> Program:
    """Return the program with int8 layers and their only readers as one op, where possible."""
    readers: defaultdict[Value, list[Op]] = defaultdict(list)
    for op in program.ops:
        for value in op.reads:
            readers[value].append(op)
    # by what they write
    layers: dict[object, Op] = {}
    ops: list[Op] = []
    for op in program.ops:
        layer = layers.get(op.operands[0])
        if layer is not None:
            ops.append(_fused(layer, op))
        elif _is_fused(op, readers, program.outputs):
            layers[op.results[0]] = op
        else:
            ops.append(op)
    return Program(ops, program.outputs)


def _is_fused(op: Op, readers: Mapping[Value, Sequence[Op]], outputs: Sequence[Value]) -> bool:
    """Return whether one op runs this op and what follows it."""
    if op.kernel not in _FUSED or op.results[0] in outputs or len(readers[op.results[0]]) != 1:
        return False
    (reader,) = readers[op.results[0]]
    return reader.kernel in _FUSED[op.kernel] and reader.operands[0] == op.results[0]


def _fused(layer: Op, op: Op) -> Op:
    """Return one op of a layer and the op behind it."""
    kernel = _FUSED[layer.kernel][op.kernel]
    return replace(
        op,
        kernel=kernel,
        operands=(*layer.operands, *op.operands[1:]),
        in_place=IN_PLACE.get(kernel, ()),
    )
