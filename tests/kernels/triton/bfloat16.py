"""Patch of Triton's interpreter so that it computes with bfloat16 as a GPU does.

numpy has no bfloat16, so the interpreter keeps such values as raw bits in uint16 arrays, and adds, compares and
multiplies these as integers. With this patch, every operation widens its operands to fp32, computes, and rounds the
result to nearest even; a reduction or scan rounds once, at its end. For Triton 3.6 to 3.9.

Casts from and to fp8 (e4m3) are torch's: the interpreter rounds its smallest numbers down.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}
_NAN = np.uint16(0x7FC0)
_FP8 = torch.float8_e4m3fn


def widen(bits: np.ndarray) -> np.ndarray:
    """Return fp32 values of bfloat16 bits, which are the upper half of fp32 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return bits of the bfloat16 values nearest to fp32 values, rounding ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    last_kept = (bits >> np.uint32(16)) & np.uint32(1)
    # a carry rounds up; a NaN could carry into infinity, so it is set below
    rounded = (bits + np.uint32(0x7FFF) + last_kept) >> np.uint32(16)
    return np.where(np.isnan(values), _NAN, rounded.astype(np.uint16)).reshape(np.shape(values))


def install() -> None:
    """Make this process's interpreter compute with bfloat16 values, not bits."""
    builder = InterpreterBuilder
    for name in ("unary_op", "create_fma", "create_clampf", "create_rsqrt"):
        setattr(builder, name, _in_fp32(getattr(builder, name)))
    builder.binary_op = _binary_op(builder.binary_op)
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _cast(builder.create_fp_to_fp)
    builder.create_dot = _dot(builder.create_dot)
    # 3.6 has no bfloat16 constants, and returns NaN where a GPU returns the other operand
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.get_bf16 = lambda self, value: _narrowed(self.get_fp32(value))
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = _accumulated_in_fp32(operation.apply_impl)


def _in_fp32(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Return a builder's method that computes in fp32 and rounds its result."""

    @wraps(method)
    def compute(self: InterpreterBuilder, *operands: Any) -> TensorHandle:
        if not any(_is_bfloat16(operand) for operand in operands):
            return method(self, *operands)
        return _narrowed(method(self, *map(_widened, operands)))

    return compute


def _binary_op(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    compute_in_fp32 = _in_fp32(method)

    @wraps(method)
    def compute(
        self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: np.ufunc
    ) -> TensorHandle:
        chosen = method if op in _BITWISE else compute_in_fp32
        return chosen(self, lhs, rhs, op)

    return compute


def _cast(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    @wraps(method)
    def cast(
        self: InterpreterBuilder, source: TensorHandle, target: tl.dtype, *rounding: Any
    ) -> TensorHandle:
        source = _widened(source)
        if source.dtype.scalar == tl.float8e4nv:
            held = torch.from_numpy(np.ascontiguousarray(source.data)).view(_FP8)
            source = TensorHandle(held.float().numpy(), tl.float32)
        if target.scalar == tl.float8e4nv:
            held = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).to(_FP8)
            return TensorHandle(held.view(torch.uint8).numpy(), tl.float8e4nv)
        if target.scalar == tl.bfloat16:
            return _narrowed(TensorHandle(source.data.astype(np.float32), tl.float32))
        if source.dtype.scalar == target.scalar:
            return source
        return method(self, source, target, *rounding)

    return cast


def _dot(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    @wraps(method)
    def dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, accumulator: Any, *how: Any
    ) -> TensorHandle:
        return method(self, _widened(a), _widened(b), accumulator, *how)

    return dot


def _accumulated_in_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction or scan that runs in fp32 and rounds its results."""

    @wraps(method)
    def apply_impl(self: Any, inputs: tuple[tl.tensor, ...]) -> Any:
        narrowed = [_is_bfloat16(tensor.handle) for tensor in inputs]
        if not any(narrowed):
            return method(self, inputs)
        results = method(self, tuple(_with_handle(t, _widened(t.handle)) for t in inputs))
        results = results if isinstance(results, (list, tuple)) else (results,)
        return tuple(
            _with_handle(result, _narrowed(result.handle)) if narrow_it else result
            for result, narrow_it in zip(results, narrowed, strict=True)
        )

    return apply_impl


def _is_bfloat16(operand: object) -> bool:
    return isinstance(operand, TensorHandle) and operand.dtype.scalar == tl.bfloat16


def _widened(operand: Any) -> Any:
    """Return a bfloat16 operand in fp32, and any other operand unchanged."""
    if not _is_bfloat16(operand):
        return operand
    return TensorHandle(widen(operand.data), tl.float32)


def _narrowed(handle: TensorHandle) -> TensorHandle:
    """Return an fp32 result in bfloat16; the result of a comparison stays boolean."""
    if handle.data.dtype == np.bool_:
        return TensorHandle(handle.data, tl.int1)
    return TensorHandle(narrow(handle.data), tl.bfloat16)


def _with_handle(tensor: tl.tensor, handle: TensorHandle) -> tl.tensor:
    """Return a tensor of the same shape that holds `handle`."""
    kind = handle.dtype
    if tensor.type.is_block():
        kind = tl.block_type(kind, tensor.type.shape)
    return tl.tensor(handle, kind)
