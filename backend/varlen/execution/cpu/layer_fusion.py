"""Linear layers of a program that also run the activation behind them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from varlen.program.program import Op, Program, Value

# For each op of a layer: the op that runs it and an activation.
_FUSED: Mapping[str, str] = {
    "linear_panels": "linear_panels_activate",
    "linear_int8_panels": "linear_int8_panels_activate",
    "linear_int4_panels": "linear_int4_panels_activate",
}


def fuse_layers(program: Program) -> Program:
    """Return the program with layers and their activations as one op, where possible."""
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
            # the activation adds no bias: the layer has
            fused = replace(op, kernel=_FUSED[layer.kernel], operands=layer.operands, in_place=())
            ops.append(fused)
        elif _is_fused(op, readers, program.outputs):
            layers[op.results[0]] = op
        else:
            ops.append(op)
    return Program(ops, program.outputs)


def _is_fused(op: Op, readers: Mapping[Value, Sequence[Op]], outputs: Sequence[Value]) -> bool:
    """Return whether one op runs this op and the activation behind it."""
    if op.kernel not in _FUSED or op.results[0] in outputs or len(readers[op.results[0]]) != 1:
        return False
    (reader,) = readers[op.results[0]]
    # an activation of 16-bit rows would read numbers that were not rounded
    return reader.kernel == "activate" and op.results[0].dtype == torch.float32
