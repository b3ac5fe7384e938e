"""A program on a CPU as few calls of compiled code.

Ops that the kernels have functions for become rows of a table: the address of a function, its work, and the addresses
of what it reads and writes. One call runs a stretch of such ops, on one core or several; the ops between run as they do
in `Program.run`. docs/decisions/0054-compiled-steps.md has measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from varlen.execution.thread_executor import LoneCores
from varlen.memory.arena import Region
from varlen.memory.usage import Dims, Size, shapes_at
from varlen.processes import python_command
from varlen.program.program import Op, PackedBatch, Program, State, Value
from varlen_kernels import cpu
from varlen_kernels.cpu.calls.calls import (
    ALWAYS,
    dtypes_of,
    extent_of,
    has_compiled_ops,
    parts_of,
    run_calls,
)
from varlen_kernels.cpu.native.threads import (
    ARGUMENTS,
    FUNCTION,
    PARTS,
    UNITS,
    usable_cores,
    using_cores,
)
from varlen_kernels.op import Bound
from varlen_kernels.op_table import OPS

Int64Array: TypeAlias = npt.NDArray[np.int64]

# Numbers of units and parts that a table keeps.
_MOST_WORK = 1 << 14


@dataclass(frozen=True, slots=True)
class _Call:
    """A function of an op, with everything that no batch changes."""

    op: int
    bound: Bound
    address: int

    @property
    def kind(self) -> object:
        """Equal for calls whose work is the same in every batch."""
        function, tensors, constants = self.bound
        return function.name, tuple(map(_extent, tensors)), tuple(constants)


@dataclass(frozen=True, slots=True)
class _Table:
    """The calls of a run, without what differs from batch to batch.

    Attributes:
        addresses: flat indices of addresses in it, and for each the number of its tensor.
        sizes: flat indices of numbers of rows in it, and for each the number of its size.
        kinds: calls whose work is the same in every batch, one of each.
        sizes_of: numbers of the sizes that the work of each kind may depend on.
        kind_of: number of the kind of each row.
        stretches: first and last row of each stretch, or the number of an op that runs as in `Program.run`.
        work: units and parts of a kind that were found before, by its number, the cores and these sizes.
    """

    rows: Int64Array
    addresses: tuple[Int64Array, Int64Array]
    sizes: tuple[Int64Array, Int64Array]
    kinds: tuple[_Call, ...]
    sizes_of: tuple[tuple[int, ...], ...]
    kind_of: Int64Array
    stretches: tuple[tuple[int, int] | int, ...]
    work: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)


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
        self._sizes = tuple(dict.fromkeys(_sizes_of(self._calls)))
        self._table = self._new_table(self._calls)
        # sizes and work of the last run, by its cores and dimensions, which most steps share with the one before
        self._last: tuple[int, Dims] = 0, {}
        self._last_sizes = self._last_work = np.empty(0, np.int64)

    @property
    def has_products(self) -> bool:
        """Whether every product is compiled: they take most of the time."""
        ops = self._program.ops
        compiled = {call.op for call in self._calls}
        return all(i in compiled for i, op in enumerate(ops) if op.kernel.startswith("linear"))

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
        stay = ALWAYS if lone is None else lone.share.byte
        outputs = tuple(program.new_outputs(dims, region.memory.device)) if out is None else out
        rows = self.filled(batch, region, outputs, cores)
        tensors: list[Any] | None = None
        for stretch in self._table.stretches:
            if isinstance(stretch, tuple):
                part = rows[stretch[0] : stretch[1]]
                # between products of oneDNN there is often nothing to share
                used = cores if cores > 1 and part[:, PARTS].max() > 1 else 1
                gained = run_calls(part, used, stay)
                if lone is not None and used > 1:
                    lone.add_gain(gained)
                continue
            if tensors is None:
                tensors = program.tensors(batch, region, self._states, outputs)
            with nullcontext() if given is None else using_cores(given):
                program.run_op(stretch, kernels, tensors)
        return tuple(outputs)

    @property
    def is_one_call(self) -> bool:
        """Whether one call runs all of it."""
        return self._table.stretches == ((0, len(self._calls)),)

    def filled(
        self,
        batch: PackedBatch,
        region: Region,
        outputs: Sequence[Tensor],
        cores: int,
    ) -> Int64Array:
        """Return the table of a run on this number of cores."""
        table, begin, dims = self._table, region.memory.data_ptr(), batch.dims
        addresses = [
            *(batch.inputs[value.name].data_ptr() for value in self._program.inputs),
            *(self._states[state.name].data_ptr() for state in self._program.states),
            *(begin + offset for offset in region.offsets),
            *(output.data_ptr() for output in outputs),
        ]
        if self._last != (cores, dims):
            (sizes,) = shapes_at([self._sizes], dims)
            work = [_work(table, kind, sizes, dims, cores) for kind in range(len(table.kinds))]
            self._last_sizes = np.array(sizes, np.int64)[table.sizes[1]]
            self._last_work = np.array(work, np.int64).reshape(-1, 2)[table.kind_of]
            self._last = cores, dict(dims)
        # nothing overwrites it: a thread that comes late may read it
        rows = table.rows.copy()
        flat = rows.ravel()
        places, numbers = table.addresses
        flat[places] = np.array(addresses, np.int64)[numbers]
        flat[table.sizes[0]] = self._last_sizes
        rows[:, UNITS : PARTS + 1] = self._last_work
        return rows

    def _new_table(self, calls: Sequence[_Call]) -> _Table:
        width = max(
            (3 * len(call.bound.tensors) + len(call.bound.constants) for call in calls), default=0
        )
        rows = np.zeros((len(calls), ARGUMENTS + width), np.int64)
        addresses, sizes, kinds = [], [], dict[object, int]()
        for i, call in enumerate(calls):
            rows[i, FUNCTION] = call.address
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
                    sizes.append((i * rows.shape[1] + offset + 1, self._sizes.index(count)))
                if isinstance(tensor, Tensor):
                    rows[i, offset] = tensor.data_ptr()
                else:
                    addresses.append((i * rows.shape[1] + offset, self._slots[tensor.name]))
            kinds.setdefault(call.kind, i)
        numbers = {kind: number for number, kind in enumerate(kinds)}
        chosen = [calls[i] for i in kinds.values()]
        return _Table(
            rows,
            _columns(addresses),
            _columns(sizes),
            tuple(chosen),
            tuple([tuple(map(self._sizes.index, _sizes_of([call]))) for call in chosen]),
            np.array([numbers[call.kind] for call in calls], np.int64),
            tuple(_stretches(len(self._program.ops), [call.op for call in calls])),
        )


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
    from varlen_kernels.cpu.calls.machine_code import address_of

    rows: list[npt.NDArray[np.int64] | list[int]] = []
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
            rows.append([address_of(entry), units, 1, *packed.tolist()])
    table = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, given in zip(table, rows, strict=True):
        row[: len(given)] = given
    return table


def _calls_of(program: Program) -> list[_Call]:
    from varlen_kernels.cpu.calls.machine_code import address_of
    from varlen_kernels.cpu.compile_all import OF_DECODERS, compile_missing

    found = []
    for number, op in enumerate(program.ops):
        for bound, entry in _bound(op):
            found.append((number, bound, entry))
    compile_missing(
        [*(entry for _, _, entry in found), *(OF_DECODERS if program.states else ())],
        python_command,
    )
    return [_Call(number, bound, address_of(entry)) for number, bound, entry in found]


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


def _work(
    table: _Table, kind: int, sizes: Sequence[int], dims: Dims, cores: int
) -> tuple[int, int]:
    """Return `_units_and_parts` of a kind of calls."""
    key = (kind, cores, *(sizes[index] for index in table.sizes_of[kind]))
    found = table.work.get(key)
    if found is None:
        if len(table.work) >= _MOST_WORK:
            table.work.clear()
        found = table.work[key] = _units_and_parts(table.kinds[kind], dims, cores)
    return found


def _units_and_parts(call: _Call, dims: Dims, cores: int) -> tuple[int, int]:
    """Return the numbers of units and of parts of a function's work."""
    extents = []
    for tensor in call.bound.tensors:
        rows, columns = _extent(tensor)
        extents.append((rows.at(dims) if isinstance(rows, Size) else rows, columns))
    units, multiplications = call.bound.function.work(extents, call.bound.constants)
    return units, parts_of(units, multiplications, cores)


def _sizes_of(calls: Sequence[_Call]) -> Iterator[Size]:
    """Yield the numbers of rows that differ from batch to batch."""
    for call in calls:
        for tensor in call.bound.tensors:
            rows, _ = _extent(tensor)
            if isinstance(rows, Size):
                yield rows


def _extent(tensor: Tensor | Value | State | None) -> tuple[int | Size, int]:
    """Return the rows and columns of a tensor: axes after the first count as one."""
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
