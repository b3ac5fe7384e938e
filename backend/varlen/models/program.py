"""A forward pass as data: recorded once over symbolic shapes, run for any batch.

A model calls the methods of `Recorder` in straight lines, as it would call torch. Each call appends
one `Op` and returns a `Value`: a named tensor whose shape says `tokens` or `sequences` where a
batch decides. The finished `Program` is what lifetimes, memory plans, pictures and execution read;
no model file knows about any of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from varlen.memory.workspace import Usage, Workspace
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
        sizes = {"tokens": tokens, "sequences": sequences}
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.shape)


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


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded forward pass."""

    ops: tuple[Op, ...]
    output: Value

    @property
    def is_per_token(self) -> bool:
        """Whether it answers each token, and not each sequence."""
        return self.output.shape[0] == "tokens"

    def usages(self) -> dict[str, Usage]:
        """Return the usage record of every intermediate: what ops write, less the output."""
        records: dict[str, Usage] = {}
        for index, op in enumerate(self.ops):
            for operand in op.operands:
                if isinstance(operand, Value) and operand.name in records:
                    records[operand.name] = records[operand.name].until(index)
            if op.result is not self.output:
                records[op.result.name] = Usage(
                    index, index, _bytes_per_token(op.result), _inherits(op)
                )
        return records

    def run(
        self, batch: Batch, kernels: object, workspace: Workspace, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the output for `batch`: `out`, or a new tensor; no part of the workspace.

        Args:
            batch: its inputs have the names that the recording gave them, on the workspace's device.
            kernels: has the functions that the ops name, such as a module.
            workspace: laid out for this program's usages; overwritten.
            out: of the output's shape for this batch.
        """
        bound: dict[str, Tensor] = dict(batch.inputs)
        for op in self.ops:
            result, shape = op.result, op.result.at(batch.tokens, batch.sequences)
            if result is not self.output:
                into = workspace.view(result.name, shape, result.dtype)
            elif out is None:
                into = torch.empty(shape, dtype=result.dtype, device=workspace.device)
            else:
                into = out
            operands = [x if isinstance(x, Tensor) else bound[x.name] for x in op.operands]
            bound[result.name] = getattr(kernels, op.kernel)(*operands, **op.attributes, out=into)
        return bound[self.output.name]


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


def _bytes_per_token(value: Value) -> int:
    # A batch has at least one token a sequence, so a row per sequence fits in a row per token.
    rows, *widths = value.at(1, 1)
    return rows * torch.Size(widths).numel() * value.dtype.itemsize


def _inherits(op: Op) -> str | None:
    """Return the name of the value whose memory the op's result may take over, if any."""
    first = op.operands[0]
    takes_over = op.kernel in IN_PLACE and isinstance(first, Value)
    return first.name if takes_over else None  # type: ignore[union-attr]
