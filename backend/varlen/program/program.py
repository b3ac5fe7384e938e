"""A forward pass as data: recorded once over symbolic shapes, run for any batch.

A model calls the methods of `Recorder` in straight lines, as it would call torch. Each call appends
one `Op` and returns a `Value`: a named tensor whose shape says `tokens` or `sequences` where a
batch decides. The finished `Program` is what lifetimes, memory plans, pictures and execution read;
no model file knows about any of them.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from varlen.memory.arena import Region
from varlen.memory.usage import Size, Usage, fold
from varlen_kernels import Activation, Pooling
from varlen_kernels.reference import IN_PLACE

Dim: TypeAlias = int | Literal["tokens", "sequences"]
Attribute: TypeAlias = int | float | str


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a batch brings or an op writes.

    Attributes:
        name: unique in its program.
        shape: `tokens` and `sequences` stand for the batch's own.
        dtype: of its elements.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype

    def at(self, tokens: int, sequences: int) -> tuple[int, ...]:
        """Return the shape for a batch of so many tokens and sequences."""
        return _at(self.shape, tokens, sequences)


Operand: TypeAlias = Value | Tensor


@dataclass(frozen=True, slots=True)
class Op:
    """One call of a kernel.

    Attributes:
        kernel: the function's name in the kernel module.
        operands: its positional arguments; a torch tensor is a weight.
        attributes: its keyword arguments.
        result: what it writes.
    """

    kernel: str
    operands: tuple[Operand, ...]
    attributes: Mapping[str, Attribute]
    result: Value


@dataclass(frozen=True, slots=True)
class Batch:
    """What one run of a program reads: `tensors` by input name, and its two sizes."""

    inputs: Mapping[str, Tensor]
    tokens: int
    sequences: int


class Program:
    """A recorded forward pass.

    Attributes:
        ops: in the order in which they run.
        output: what the last of them writes.
        usages: the memory that intermediates use, in the order of their first op; the output is none of them.
        usage_of: the usage of each intermediate, by name.
        buffers: the usages, those that may always share a place together.
    """

    def __init__(self, ops: AnySequence[Op], output: Value) -> None:
        self.ops = tuple(ops)
        self.output = output
        self.usages, self.usage_of = _derive_usages(self.ops, output)
        self.buffers = fold(self.usages)
        number = {usage: i for i, buffer in enumerate(self.buffers) for usage in buffer.usages}
        # of each op but the last, the buffer that it writes; many ops write one buffer in one form
        self._writes = [
            (number[self.usage_of[op.result.name]], op.result.shape, op.result.dtype)
            for op in self.ops
            if op.result is not output
        ]

    @property
    def is_per_token(self) -> bool:
        """Whether it answers each token, and not each sequence."""
        return self.output.shape[0] == "tokens"

    def run(
        self, batch: Batch, kernels: object, region: Region, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the output for `batch`: `out`, or a new tensor; no part of the region.

        Args:
            batch: its inputs have the names that the recording gave them, on the region's device.
            kernels: has the functions that the ops name, such as a module.
            region: laid out for this program and a batch of this shape; overwritten.
            out: of the output's shape for this batch.
        """
        tokens, sequences = batch.tokens, batch.sequences
        if out is None:
            shape = self.output.at(tokens, sequences)
            out = torch.empty(shape, dtype=self.output.dtype, device=region.memory.device)
        views = {
            (buffer, shape, dtype): region.view(buffer, _at(shape, tokens, sequences), dtype)
            for buffer, shape, dtype in set(self._writes)
        }
        written = [*map(views.__getitem__, self._writes), out]
        bound: dict[str, Tensor] = dict(batch.inputs)
        for op, into in zip(self.ops, written, strict=True):
            operands = [x if isinstance(x, Tensor) else bound[x.name] for x in op.operands]
            bound[op.result.name] = getattr(kernels, op.kernel)(
                *operands, **op.attributes, out=into
            )
        return out


class Recorder:
    """The ops that a model may call. Each appends to the program and returns a symbolic tensor.

    The meaning, shapes and precision of each are those of the function of the same name in `varlen_kernels.reference`.
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []

    def finish(self, output: Value) -> Program:
        """Return the program that computes `output`, the result of its last op."""
        return Program(tuple(self._ops), output)

    def embed_layer_norm(
        self,
        token_ids: Value,
        position_ids: Value,
        type_ids: Value,
        token_table: Tensor,
        position_table: Tensor,
        type_table: Tensor,
        weight: Tensor,
        bias: Tensor,
        *,
        eps: float,
    ) -> Value:
        operands = (
            token_ids,
            position_ids,
            type_ids,
            token_table,
            position_table,
            type_table,
            weight,
            bias,
        )
        shape: tuple[Dim, ...] = (*token_ids.shape, token_table.shape[1])
        return self._add("embed_layer_norm", operands, shape, token_table.dtype, eps=eps)

    def linear(self, x: Value, weight: Tensor, bias: Tensor) -> Value:
        return self._add("linear", (x, weight, bias), (x.shape[0], weight.shape[1]), x.dtype)

    def activate(self, x: Value, *, kind: Activation) -> Value:
        return self._add("activate", (x,), x.shape, x.dtype, kind=kind)

    def tanh(self, x: Value) -> Value:
        return self._add("tanh", (x,), x.shape, x.dtype)

    def add_layer_norm(
        self, x: Value, residual: Value, weight: Tensor, bias: Tensor, *, eps: float
    ) -> Value:
        return self._add("add_layer_norm", (x, residual, weight, bias), x.shape, x.dtype, eps=eps)

    def attention_varlen(
        self, qkv: Value, cu_seqlens: Value, *, num_heads: int, scale: float
    ) -> Value:
        width = qkv.shape[1]
        assert isinstance(width, int)
        shape: tuple[Dim, ...] = (qkv.shape[0], width // 3)
        return self._add(
            "attention_varlen",
            (qkv, cu_seqlens),
            shape,
            qkv.dtype,
            num_heads=num_heads,
            scale=scale,
        )

    def pool(self, x: Value, cu_seqlens: Value, normalize: Value, *, mode: Pooling) -> Value:
        operands = (x, cu_seqlens, normalize)
        return self._add("pool", operands, ("sequences", x.shape[1]), torch.float32, mode=mode)

    def first_tokens(self, x: Value, cu_seqlens: Value) -> Value:
        return self._add("first_tokens", (x, cu_seqlens), ("sequences", x.shape[1]), x.dtype)

    def to_fp32(self, x: Value) -> Value:
        return self._add("to_fp32", (x,), x.shape, torch.float32)

    def _add(
        self,
        kernel: str,
        operands: tuple[Operand, ...],
        shape: tuple[Dim, ...],
        dtype: torch.dtype,
        **attributes: Attribute,
    ) -> Value:
        result = Value(f"{len(self._ops)}:{kernel}", shape, dtype)
        self._ops.append(Op(kernel, operands, attributes, result))
        return result


def _at(shape: tuple[Dim, ...], tokens: int, sequences: int) -> tuple[int, ...]:
    sizes = {"tokens": tokens, "sequences": sequences}
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in shape)


def _derive_usages(
    ops: AnySequence[Op], output: Value
) -> tuple[tuple[Usage, ...], dict[str, Usage]]:
    """Return all usages, and the usage of each value that ops write, less the output."""
    last_read = {
        operand.name: index
        for index, op in enumerate(ops)
        for operand in op.operands
        if isinstance(operand, Value)
    }
    usages: list[Usage] = []
    number_of: dict[str, int] = {}
    for index, op in enumerate(ops):
        name, parent = op.result.name, _overwritable(op)
        if op.result is output:
            continue
        last_op = last_read.get(name, index)
        if parent in number_of and last_read[parent] == index:
            number_of[name] = number_of[parent]
            usages[number_of[name]] = replace(usages[number_of[name]], last_op=last_op)
        else:
            number_of[name] = len(usages)
            usages.append(Usage(name, index, last_op, _size(op.result)))
    return tuple(usages), {name: usages[number] for name, number in number_of.items()}


def _size(value: Value) -> Size:
    rows, *widths = value.shape
    row = math.prod(width for width in widths if isinstance(width, int)) * value.dtype.itemsize
    assert all(isinstance(width, int) for width in widths), (
        "a batch decides the number of rows alone"
    )
    if rows == "tokens":
        return Size(per_token=row)
    if rows == "sequences":
        return Size(per_sequence=row)
    return Size(fixed=rows * row)


def _overwritable(op: Op) -> str | None:
    """Return the name of the value that the op may write its result over, if any."""
    read = [operand.name for operand in op.operands if isinstance(operand, Value)]
    first = op.operands[0]
    overwritable = (
        op.kernel in IN_PLACE and isinstance(first, Value) and read.count(first.name) == 1
    )
    return read[0] if overwritable else None
