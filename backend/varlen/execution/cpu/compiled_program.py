"""A program on a CPU as few calls of compiled code.

Ops that the kernels have functions for become rows of a table (`call_table`). One call runs a stretch of such ops; the
ops between run as they do in `Program.run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from varlen.execution.cpu.call_table import (
    CallKind,
    CallTable,
    Extent,
    run_rows,
    sizes_of,
)
from varlen.execution.packing import Int64Array
from varlen.execution.thread_executor import LoneCores
from varlen.memory.planner import Region, Size
from varlen.processes import python_command
from varlen.program.program import Op, PackedBatch, Program, State, Value
from varlen_kernels import cpu
from varlen_kernels.cpu.calls.calls import dtypes_of
from varlen_kernels.cpu.calls.run_calls import extent_of, has_compiled_ops, loaded_address
from varlen_kernels.cpu.native.threads import ARGUMENTS, FUNCTION, usable_cores, using_cores
from varlen_kernels.op import Bound
from varlen_kernels.op_table import OPS


@dataclass(frozen=True, slots=True)
class _Call:
    """A function of an op, with everything that no batch changes."""

    op: int
    bound: Bound
    entry: str

    @property
    def kind(self) -> CallKind:
        function, tensors, constants = self.bound
        return CallKind(function.name, tuple(map(_extent, tensors)), tuple(constants))


class CompiledProgram:
    """Runs a program as few calls of compiled code. Not for two threads at once."""

    def __init__(self, program: Program, states: Mapping[str, Tensor]) -> None:
        """Compile the functions that the program needs.

        Args:
            program: the program, in memory of the CPU.
        """
        self._program = program
        self._states = states
        self._calls = _calls_of(program)
        # inputs and states, then buffers of the region, then outputs
        bound: tuple[Value | State, ...] = (*program.inputs, *program.states)
        self._slots = {each.name: i for i, each in enumerate(bound)}
        first = len(bound)
        self._slots |= {name: first + buffer for name, buffer in program.buffer_of.items()}
        first += len(program.buffers)
        self._slots |= {output.name: first + i for i, output in enumerate(program.outputs)}
        # flat indices of the addresses of weights, and each weight
        self.weights: list[tuple[int, Tensor]] = []
        self.table = self._new_table(self._calls)
        self._stretches = tuple(_stretches(len(program.ops), [call.op for call in self._calls]))

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the ops that have no compiled form, each once."""
        ops = self._program.ops
        return tuple(
            dict.fromkeys(ops[each].kernel for each in self._stretches if isinstance(each, int))
        )

    @property
    def has_products(self) -> bool:
        """Whether every product is compiled: they take most of the time."""
        return not any(name.startswith("linear") for name in self.others)

    def run(
        self,
        batch: PackedBatch,
        kernels: object,
        region: Region,
        *,
        out: Sequence[Tensor] | None = None,
        lone: LoneCores | None = None,
        cores: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs for a batch; see `Program.run`.

        Args:
            lone: the cores that a lone batch may use.
            cores: number of cores of any other batch; None for the cores of the thread.
        """
        program, dims = self._program, batch.dims
        given = cores
        if lone is not None:
            cores = lone.count
        elif cores is None:
            cores = usable_cores()
        outputs = tuple(program.new_outputs(dims, region.memory.device)) if out is None else out
        rows = self.filled(batch, region, outputs, cores)
        tensors: list[Any] | None = None
        for stretch in self._stretches:
            if isinstance(stretch, tuple):
                run_rows(rows[slice(*stretch)], cores, lone)
                continue
            if tensors is None:
                tensors = program.tensors(batch, region, self._states, outputs)
            with nullcontext() if given is None else using_cores(given):
                program.run_op(stretch, kernels, tensors)
        return tuple(outputs)

    @property
    def is_one_call(self) -> bool:
        """Whether one call runs all of it."""
        return self._stretches == ((0, len(self._calls)),)

    @property
    def entries(self) -> list[str]:
        """Name of the code of each call."""
        return [call.entry for call in self._calls]

    def filled(
        self,
        batch: PackedBatch,
        region: Region,
        outputs: Sequence[Tensor],
        cores: int,
    ) -> Int64Array:
        """Return the table of a run on this number of cores."""
        begin = region.memory.data_ptr()
        addresses = [
            *(batch.inputs[value.name].data_ptr() for value in self._program.inputs),
            *(self._states[state.name].data_ptr() for state in self._program.states),
            *(begin + offset for offset in region.offsets),
            *(output.data_ptr() for output in outputs),
        ]
        return self.table.filled(addresses, batch.dims, cores)

    def _new_table(self, calls: Sequence[_Call]) -> CallTable:
        width = max(
            (3 * len(call.bound.tensors) + len(call.bound.constants) for call in calls), default=0
        )
        rows = np.zeros((len(calls), ARGUMENTS + width), np.int64)
        addresses, sizes = [], []
        kinds = {
            kind: number for number, kind in enumerate(dict.fromkeys(call.kind for call in calls))
        }
        all_sizes = sizes_of([*kinds])
        for i, call in enumerate(calls):
            rows[i, FUNCTION] = loaded_address(call.entry)
            # each tensor is three numbers
            nothing = [0, 0, 0] * len(call.bound.tensors)
            packed = call.bound.function.pack(*nothing, *call.bound.constants)
            rows[i, ARGUMENTS : ARGUMENTS + len(packed) // 8] = np.frombuffer(packed, np.int64)
            for j, tensor in enumerate(call.bound.tensors):
                offset = ARGUMENTS + 3 * j
                if tensor is None:
                    continue
                count, columns = _extent(tensor)
                rows[i, offset + 2] = columns
                if isinstance(count, int):
                    rows[i, offset + 1] = count
                else:
                    sizes.append((i * rows.shape[1] + offset + 1, all_sizes.index(count)))
                if isinstance(tensor, Tensor):
                    rows[i, offset] = tensor.data_ptr()
                    self.weights.append((i * rows.shape[1] + offset, tensor))
                else:
                    addresses.append((i * rows.shape[1] + offset, self._slots[tensor.name]))
        numbers = np.array([kinds[call.kind] for call in calls], np.int64)
        return CallTable(rows, _columns(addresses), _columns(sizes), [*kinds], numbers)


def compile_program(
    program: Program,
    kernels: object,
    states: Mapping[str, Tensor] | None = None,
    *,
    needs_products: bool = False,
) -> CompiledProgram | None:
    """Return the program as calls of compiled code, if there are any.

    There are none for other kernels.

    Args:
        needs_products: whether there are none if a product has no compiled form: such a product uses the cores of
            torch, and others have to be given to it.
    """
    if kernels is not cpu or not has_compiled_ops():
        return None
    compiled = CompiledProgram(program, states or {})
    return compiled if compiled.has_products or not needs_products else None


def one_table(parts: Sequence[Int64Array | Sequence[Bound]]) -> Int64Array:
    """Return one table of tables and functions; each function has one part.

    Args:
        parts: tensors of functions are contiguous and of the dtypes that they read. The caller holds them.
    """
    rows: list[Int64Array | list[int]] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            rows += [*part]
            continue
        for function, tensors, constants in part:
            entry = function.entry_for(dtypes_of(tensors))
            assert entry is not None
            extents = [extent_of(each.shape) for each in tensors]
            places = zip(tensors, extents, strict=True)
            numbers = [number for each, extent in places for number in (each.data_ptr(), *extent)]
            packed = np.frombuffer(function.pack(*numbers, *constants), np.int64)
            units, _ = function.work(extents, constants)
            rows.append([loaded_address(entry), units, 1, *packed.tolist()])
    table = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, given in zip(table, rows, strict=True):
        row[: len(given)] = given
    return table


def _calls_of(program: Program) -> list[_Call]:
    from varlen_kernels.cpu.compile_all import OF_DECODERS, compile_missing

    found = []
    for number, op in enumerate(program.ops):
        for bound, entry in _bound(op):
            found.append((number, bound, entry))
    compile_missing(
        [*(entry for _, _, entry in found), *(OF_DECODERS if program.states else ())],
        python_command,
    )
    return [_Call(*each) for each in found]


def _bound(op: Op) -> list[tuple[Bound, str]]:
    row = OPS.get(op.kernel)
    if row is None or not row.calls:
        return []
    results = dict(zip(row.results, op.results, strict=False))
    found = []
    for bound in row.bound(row.named(op.operands, op.attributes) | results):
        widened = bound.function.widened(dtypes_of(bound.tensors))
        tensors = [
            (each.float() if i in widened else each).contiguous()
            if isinstance(each, Tensor)
            else each
            for i, each in enumerate(bound.tensors)
        ]
        entry = bound.function.entry_for(dtypes_of(tensors))
        if entry is None:
            return []
        found.append((bound._replace(tensors=tensors), entry))
    return found


def _extent(tensor: Tensor | Value | State | None) -> Extent:
    if tensor is None:
        return 0, 0
    shape: Sequence[int | Size] = tensor.shape
    columns = prod(axis for axis in shape[1:] if isinstance(axis, int))
    return shape[0], columns


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Int64Array, Int64Array]:
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, second


def _stretches(ops: int, calls: Sequence[int]) -> Iterator[tuple[int, int] | int]:
    """Yield the stretches of calls and the other ops, in order."""
    first = call = 0
    for op in range(ops):
        if call < len(calls) and calls[call] == op:
            while call < len(calls) and calls[call] == op:
                call += 1
            continue
        if first < call:
            yield first, call
            first = call
        yield op
    if first < call:
        yield first, call
