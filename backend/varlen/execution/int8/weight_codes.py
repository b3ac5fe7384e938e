"""Codes of 8 bits for the linear layers of a model on a GPU.

Weights are loaded into memory of the host, and codes are made on the GPU, layer by layer: it holds a byte of each.
docs/decisions/0128-codes-on-a-gpu.md has the reasons.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from varlen.execution.int8.quantization import LINEAR, linear_weights
from varlen.program.program import Op, Operand, Program
from varlen_kernels.reference.linear_int8 import SMALLEST_SCALE, nearest_codes
from varlen_kernels.reference.linear_layers import CodedWeight, LinearWeight

_log = logging.getLogger(__name__)

# Form of codes.
Codes: TypeAlias = Literal["int8", "fp8"]
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


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
