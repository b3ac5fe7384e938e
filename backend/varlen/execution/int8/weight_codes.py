"""Codes of 8 bits for the linear layers of a model on a GPU, and the quality of its answers.

Activations stay floats of 16 bits, so the nearest codes suffice and no texts calibrate them. Weights are loaded into
memory of the host, and codes are made on the GPU, layer by layer: it holds a byte of each weight, also while the model
loads. To measure the quality, weights of the host go to the GPU when an op reads them.
docs/decisions/0128-codes-on-a-gpu.md has the reasons.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from varlen.execution.int8.int8_model import CalibratedModel, measure
from varlen.execution.int8.quantization import LINEAR, linear_weights
from varlen.program.program import Op, Operand, Program
from varlen_kernels.reference.linear_int8 import SMALLEST_SCALE, nearest_codes
from varlen_kernels.reference.linear_layers import CodedWeight

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
    model: CalibratedModel[Any],
    programs: Sequence[Program],
    codes: Codes,
    kernels: "OnDevice",
) -> tuple[Program, ...]:
    """Return programs on a GPU with the linear layers of a model in codes.

    Args:
        model: the model that they were recorded from, with weights in memory of the host, as are theirs.
        kernels: kernels that run both on the GPU.
    """
    layers = {id(weight): weight for weight, _ in linear_weights(model.programs).values()}
    began = time.monotonic()
    coded = {key: coded_weight(kernels.move(each), codes) for key, each in layers.items()}
    dtype = str(next(iter(layers.values())).dtype).removeprefix("torch.")
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
    quality = measure(model, [use_codes(each, coded) for each in model.programs], kernels)
    _log.info(
        "%s: codes for the weights of %d linear layers of the %s, all else in %s; %s, in %.1f s",
        codes,
        len(layers),
        model.name,
        short,
        quality.beside(short),
        time.monotonic() - began,
    )
    if not quality.is_high:
        _log.warning(
            "%s changes the answers of this checkpoint: %s; use dtype auto where that matters",
            codes,
            quality.beside(short),
        )
    move = _Move(kernels.move.device, {})
    return tuple(use_codes(each, coded, move) for each in programs)


def use_codes(
    program: Program, coded: dict[int, CodedWeight], move: Callable[[Any], Any] = lambda x: x
) -> Program:
    """Return a program with coded weights, and others as `move` returns them."""

    def replaced(op: Op) -> Op:
        operands: list[Operand] = [*op.operands]
        if op.kernel in LINEAR:
            operands[1] = coded.get(id(operands[1]), operands[1])
        return replace(op, operands=tuple(map(move, operands)))

    return Program([replaced(op) for op in program.ops], program.outputs)


class _Move:
    """Returns operands with their tensors on a device.

    Shared weights stay shared if it keeps what it has returned, by the id of the operand.
    """

    def __init__(self, device: torch.device, kept: dict[int, Any] | None = None) -> None:
        self.device, self._kept = device, kept

    def __call__(self, operand: Any) -> Any:
        if not isinstance(operand, Tensor | tuple):
            return operand
        if self._kept is not None and id(operand) in self._kept:
            return self._kept[id(operand)]
        moved: Any
        if isinstance(operand, Tensor):
            moved = operand.to(self.device)
        elif hasattr(operand, "_fields"):
            moved = type(operand)(*map(self, operand))
        else:
            moved = tuple(map(self, operand))
        if self._kept is not None:
            self._kept[id(operand)] = moved
        return moved


class OnDevice:
    """Kernels of a device that move the weights that they read there."""

    def __init__(self, kernels: object, device: torch.device) -> None:
        self._kernels, self.move = kernels, _Move(device)

    def __getattr__(self, name: str) -> Callable[..., object]:
        kernel = getattr(self._kernels, name)

        def moving(*operands: object, **options: object) -> object:
            result: object = kernel(*map(self.move, operands), **options)
            return result

        return moving
