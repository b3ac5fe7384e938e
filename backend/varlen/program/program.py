"""A forward pass as data: a list of ops over symbolic shapes.

A `Recorder` makes it. Lifetimes, memory plans, pictures and execution are all derived from the list of ops;
no model file knows about any of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul
from typing import Any, TypeAlias

import torch
from torch import Tensor

from varlen.memory.planner import Dims, Region, Shape, Size, Usage, fold, shapes_at

Attribute: TypeAlias = int | float | str

# The first axis of what has a row for each token.
_TOKENS = Size(tokens=1)
NO_STATES: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a batch brings or an op writes.

    Attributes:
        name: unique in its program.
        shape: symbolic axes get their length from the batch.
    """

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> Size:
        """Size in bytes.

        Raises:
            ValueError: it has more than one symbolic axis.
        """
        return reduce(mul, self.shape, Size(self.dtype.itemsize))

    def at(self, dims: Dims) -> tuple[int, ...]:
        """Return the shape for a batch of these dimensions."""
        return shapes_at([self.shape], dims)[0]


@dataclass(frozen=True, slots=True)
class State:
    """A tensor outside the arena that outlives runs, such as a KV cache.

    Attributes:
        name: unique in its program.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


# A torch tensor is a weight; a named tuple holds the weights of one argument. None stands for an optional operand that
# is left out.
Weights: TypeAlias = Tensor | tuple[Tensor | int | None, ...]
Operand: TypeAlias = Value | State | Weights | None


@dataclass(frozen=True, slots=True)
class Op:
    """One call of a kernel.

    Attributes:
        kernel: name of the function in the kernel module.
        results: tensors that it writes into `out`: one tensor, or a tuple of several; no `out` if there is none.
        writes: the states among its operands that it changes.
        in_place: position, for each result, of the operand that it may be written over; may be shorter.
    """

    kernel: str
    operands: tuple[Operand, ...]
    attributes: Mapping[str, Attribute]
    results: tuple[Value, ...]
    writes: tuple[State, ...] = ()
    in_place: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[Value, ...]:
        return tuple(operand for operand in self.operands if isinstance(operand, Value))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        groups = [each if isinstance(each, tuple) else (each,) for each in self.operands]
        return tuple(each for group in groups for each in group if isinstance(each, Tensor))

    @property
    def is_by_token(self) -> bool:
        """Whether it treats each token by itself: nothing tells it where sequences begin."""
        values = (*self.reads, *self.results)
        has_rows = bool(self.reads) and all(value.shape[0] == _TOKENS for value in values)
        return has_rows and not self.writes

    def overwritable(self, result: int) -> Value | None:
        """Return the operand that a result may overwrite if no later op reads it."""
        if result >= len(self.in_place):
            return None
        operand = self.operands[self.in_place[result]]
        if not isinstance(operand, Value) or self.reads.count(operand) > 1:
            return None
        return operand


# Runs one op: gets it, its kernel, the tensors of its operands, and the tensors of its results.
CallOp: TypeAlias = Callable[[Op, Callable[..., object], list[Any], tuple[Tensor, ...]], None]


def call_kernel(
    op: Op, kernel: Callable[..., object], operands: list[Any], out: tuple[Tensor, ...]
) -> None:
    """Run one op by its kernel; see `CallOp`."""
    if out:
        kernel(*operands, **op.attributes, out=out[0] if len(out) == 1 else out)
    else:
        kernel(*operands, **op.attributes)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What one run of a program reads.

    Attributes:
        inputs: tensors by the names that the recording gave them.
    """

    inputs: Mapping[str, Tensor]
    dims: Dims


class Program:
    """A recorded forward pass.

    Attributes:
        ops: calls in the order in which they run.
        inputs: the values that a batch brings, in the order in which they are first read.
        states: the states that ops read or write, in the order of first use.
        outputs: the results that a run returns.
        usages: the memory that intermediates use, in the order of their first op; outputs are not among them.
        usage_of: the usage of each intermediate, by name.
        buffers: the usages, grouped so that each group may always share one place.
        buffer_of: number of the buffer of each intermediate, by name.
    """

    def __init__(self, ops: Sequence[Op], outputs: Sequence[Value]) -> None:
        self.ops = tuple(ops)
        self.outputs = tuple(outputs)
        results = {result for op in self.ops for result in op.results}
        reads = dict.fromkeys(value for op in self.ops for value in op.reads)
        self.inputs = tuple(value for value in reads if value not in results)
        operands = [operand for op in self.ops for operand in op.operands]
        self.states = tuple(dict.fromkeys(x for x in operands if isinstance(x, State)))
        self.usages, self.usage_of = _derive_usages(self.ops, self.outputs)
        self.buffers = fold(self.usages)
        self._bind()

    @property
    def row_dimension(self) -> str:
        """The dimension that the rows of its output have: tokens, sequences or masks."""
        rows = self.outputs[0].shape[0]
        assert isinstance(rows, Size)
        [(name, _)] = rows.per
        return name

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that it reads; see `bytes_of`."""
        return bytes_of(self.weights)

    @property
    def weights(self) -> list[Tensor]:
        """The weights that each op reads, in order."""
        return [weight for op in self.ops for weight in op.weights]

    def run(
        self,
        batch: PackedBatch,
        kernels: object,
        region: Region,
        *,
        states: Mapping[str, Tensor] = NO_STATES,
        out: Sequence[Tensor] | None = None,
        call: CallOp | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs for `batch`: `out`, or new tensors; none is part of the region.

        Args:
            batch: tensors on the region's device.
            kernels: has the functions that the ops name, such as a module.
            region: laid out for this program and a batch of these dimensions; overwritten.
            states: the tensor of each state, by name; those that ops write are changed.
            call: runs an op instead of its kernel: gets the op, the kernel, its operands and `out`.
        """
        outputs = tuple(self.new_outputs(batch.dims, region.memory.device)) if out is None else out
        tensors = self.tensors(batch, region, states, outputs)
        for number in range(len(self.ops)):
            self.run_op(number, kernels, tensors, call)
        return tuple(outputs)

    def tensors(
        self,
        batch: PackedBatch,
        region: Region,
        states: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
    ) -> list[Any]:
        """Return everything that ops of a run read and write, for `run_op`; see `run`."""
        return [
            *self._constants,
            *(batch.inputs[value.name] for value in self.inputs),
            *(states[state.name] for state in self.states),
            *region.views(self._views, batch.dims),
            *outputs,
        ]

    def run_op(
        self, number: int, kernels: object, tensors: Sequence[Any], call: CallOp | None = None
    ) -> None:
        op, reads, writes = self._calls[number]
        operands, out = [tensors[slot] for slot in reads], tuple([tensors[slot] for slot in writes])
        (call or call_kernel)(op, getattr(kernels, op.kernel), operands, out)

    def new_outputs(self, dims: Dims, device: torch.device) -> Iterator[Tensor]:
        """Yield an uninitialised tensor for each output of a batch of these dimensions."""
        for value in self.outputs:
            yield torch.empty(value.at(dims), dtype=value.dtype, device=device)

    def _bind(self) -> None:
        """Assign slots to the tensors: constants, inputs, states, views of the region, outputs."""
        number = {usage: i for i, buffer in enumerate(self.buffers) for usage in buffer.usages}
        self.buffer_of = {name: number[usage] for name, usage in self.usage_of.items()}
        # many ops write one buffer in one form, and share its view
        form = {
            result: (self.buffer_of[result.name], result.shape, result.dtype)
            for op in self.ops
            for result in op.results
            if result not in self.outputs
        }
        self._views = list(dict.fromkeys(form.values()))
        by_id = {
            id(operand): operand
            for op in self.ops
            for operand in op.operands
            if not isinstance(operand, Value | State)
        }
        self._constants = list(by_id.values())
        keys = [*by_id, *self.inputs, *self.states, *self._views, *self.outputs]
        slots: dict[object, int] = {key: index for index, key in enumerate(keys)}
        slots |= {value: slots[view] for value, view in form.items()}

        def slot_of(operand: Operand) -> int:
            return slots[operand if isinstance(operand, Value | State) else id(operand)]

        self._calls = [
            (op, [slot_of(x) for x in op.operands], [slot_of(x) for x in op.results])
            for op in self.ops
        ]


def bytes_of(weights: Sequence[Tensor]) -> int:
    """Return the bytes of some weights; what several of them share counts once."""
    # weights in a layout of oneDNN have no address
    opaque = {id(each): each.numel() * each.itemsize for each in weights if each.is_mkldnn}
    total, end = sum(opaque.values()), 0
    for first, last in sorted(_span(each) for each in weights if not each.is_mkldnn):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def _span(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.itemsize


def _derive_usages(
    ops: Sequence[Op], outputs: Sequence[Value]
) -> tuple[tuple[Usage, ...], dict[str, Usage]]:
    """Return all usages, and the usage of each value that ops write, without the outputs."""
    last_read = {value.name: index for index, op in enumerate(ops) for value in op.reads}
    usages: list[Usage] = []
    number_of: dict[str, int] = {}
    for index, op in enumerate(ops):
        for position, result in enumerate(op.results):
            if result in outputs:
                continue
            last_op = last_read.get(result.name, index)
            parent = op.overwritable(position)
            number = number_of.get(parent.name) if parent else None
            if (
                parent is not None
                and number is not None
                and last_read[parent.name] == index
                and usages[number].size == result.nbytes
            ):
                number_of[result.name] = number
                usages[number] = replace(usages[number], last_op=last_op)
            else:
                number_of[result.name] = len(usages)
                usages.append(Usage(result.name, index, last_op, result.nbytes))
    return tuple(usages), {name: usages[number] for name, number in number_of.items()}
