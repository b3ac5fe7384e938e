"""Batches of a model whose ops are all compiled, in a process without torch.

A process that has loaded a model leaves the table of its calls, the plan of its memory and its weights in one file in
memory, and executes itself anew as a process that reads the file and imports no torch (`child`). Workers are forked
from that one. docs/decisions/0137-workers-without-torch.md has measurements.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from varlen.execution.cpu.call_table import CallKind, CallTable, TableRunner
from varlen.execution.one_shot import OneShot
from varlen.execution.thread_executor import CoreShare
from varlen.execution.workers.messages import Array, Work, batch_of, content_of, message_of
from varlen.memory.memory_use import MemoryUse, Swap
from varlen.memory.planner import HOST_ALIGNMENT, Axis, Buffer, Size, Usage, huge_pages, new_shared
from varlen.request.request import DEFAULT_OPTIONS, SHORTEST_PROMPT, Prompt, RequestOptions

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.execution.runner import Runner

_Batch: TypeAlias = tuple[Sequence[Prompt], Sequence[RequestOptions]]
# Weights beyond this stay where they are: torch is little beside them, and for a moment there are two copies.
_MOST_BYTES = 1 << 30
# Bytes that are read at once, from the end of the file, which is cut there: so a load holds no second copy.
_PART_BYTES = 8 << 20
# Bytes of the length of the message that the file begins with.
_LENGTH_BYTES = 8
_PAGE = 4096


def torch_reason(runner: Runner) -> str:
    """Return why the workers of a whole model need torch; empty if they need none."""
    state = runner.state
    if type(state) is not OneShot or state.adapters is not None or runner.info.is_padded:
        return "the model has several programs, or adapters, or pads sequences"
    compiled, program = runner.cpu_runner.compiled, runner.program
    if compiled is None:
        return "the products are not compiled"
    if compiled.others:
        return f"no code is compiled for {', '.join(compiled.others)}"
    if [str(value.dtype) for value in program.outputs] != ["torch.float32"]:
        return "the output is not in fp32"
    if program.weight_bytes > _MOST_BYTES:
        return f"the weights have more than {_MOST_BYTES >> 30} GiB"
    return ""


def write_model(runner: Runner, log_level: str) -> int:
    """Return the descriptor of a file in memory that holds a compiled model."""
    state, compiled, program = runner.state, runner.cpu_runner.compiled, runner.program
    assert isinstance(state, OneShot)
    assert compiled is not None
    table, weights = compiled.table, [weight for _, weight in compiled.weights]
    parts = _parts(weights)
    begins = np.array([first for first, _, _ in parts], np.int64)
    addresses = np.array([weight.data_ptr() for weight in weights], np.int64)
    of_part = np.searchsorted(begins, addresses, "right") - 1
    _, num_bytes, place = parts[-1]
    values = {
        "log_level": log_level,
        "facts": runner.facts(),
        "state": (state.task, state.unweighted),
        "weight_bytes": place + num_bytes,
        "kinds": [
            (
                kind.function,
                [(_as_json(rows), columns) for rows, columns in kind.extents],
                kind.constants,
            )
            for kind in table.kinds
        ],
        "program": {
            "entries": compiled.entries,
            "inputs": [value.name for value in program.inputs],
            "row_dimension": program.row_dimension,
            "largest": runner.arena.largest,
        },
        "output": [*map(_as_json, program.outputs[0].shape)],
        "buffers": [(each.lifetimes, _as_json(each.size)) for each in program.buffers],
    }
    arrays = [
        *(table.rows, *table.addresses, *table.sizes, table.kind_of),
        np.array([index for index, _ in compiled.weights], np.int64),
        addresses - begins[of_part] + np.array([place for *_, place in parts], np.int64)[of_part],
    ]
    message = message_of(values, arrays)
    begin = _begin_of_weights(len(message))
    descriptor = new_shared(begin + place + num_bytes)
    os.pwrite(descriptor, len(message).to_bytes(_LENGTH_BYTES, "little") + message, 0)
    for first, num_bytes, place in parts:
        os.pwrite(descriptor, (ctypes.c_char * num_bytes).from_address(first), begin + place)
    return descriptor


class CompiledWork(Work[_Batch, _Batch]):
    """Batches of a model from such a file; it is its own `LoadedModel`.

    Attributes:
        log_level: the level that the settings have.
    """

    is_forked = True
    read = staticmethod(batch_of)

    def __init__(self, descriptor: int) -> None:
        """Read a file, and cut it off as it is read.

        Raises:
            ImportError, RuntimeError: see `address_of`.
        """
        self.runner = self
        length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
        values, arrays = content_of(os.pread(descriptor, length, _LENGTH_BYTES))
        rows, places, numbers, size_places, size_numbers, kind_of, indices, offsets = arrays
        self._weights = _read_weights(
            descriptor, _begin_of_weights(length), max(1, values["weight_bytes"])
        )
        rows.ravel()[indices] = self._weights.ctypes.data + offsets
        kinds = [
            CallKind(
                name, tuple((_axis(each), columns) for each, columns in extents), tuple(constants)
            )
            for name, extents, constants in values["kinds"]
        ]
        buffers = []
        for lifetimes, size in values["buffers"]:
            whole = Size(size[0], **size[1])
            usages = tuple(Usage("", first, last, whole) for first, last in lifetimes)
            buffers.append(Buffer(usages, whole))
        self._device = TableRunner(
            CallTable(rows, (places, numbers), (size_places, size_numbers), kinds, kind_of),
            output=tuple(map(_axis, values["output"])),
            buffers=buffers,
            **values["program"],
        )
        self._state = OneShot(self._device, *values["state"])
        self.log_level: str = values["log_level"]
        self._facts: dict[str, Any] = values["facts"]

    def facts(self) -> dict[str, Any]:
        return self._facts

    def share_cores(self, share: CoreShare) -> None:
        self._device.share_cores(share, self._facts["workers"])

    def use(self) -> MemoryUse:
        return self._device.memory.use()

    def new_swaps(self) -> Sequence[Swap]:
        return ()

    def release_arenas(self) -> None:
        self._device.memory.release()

    def warm_up(self) -> None:
        self._state.run([SHORTEST_PROMPT], [DEFAULT_OPTIONS])

    def prepare(self, batch: _Batch) -> _Batch:
        return batch

    def run(self, _: _Batch, part: Callable[[], _Batch], /) -> Sequence[Array]:
        return self._state.run(*part())


def _parts(weights: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Return address, bytes and place in the file of each part of the weights.

    Weights that share memory share it in the file. A part keeps its place in a line of the cache.
    """
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in weights)
    merged: list[list[int]] = []
    for first, last in spans or [(0, 0)]:
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    parts, end = [], 0
    for first, last in merged:
        place = end + (first - end) % HOST_ALIGNMENT
        parts.append((first, last - first, place))
        end = place + last - first
    return parts


def _begin_of_weights(length: int) -> int:
    return -(-(_LENGTH_BYTES + length) // _PAGE) * _PAGE


def _read_weights(descriptor: int, begin: int, num_bytes: int) -> Array:
    """Return the weights behind a message, `[num_bytes]` uint8; the file is empty and closed then."""
    pages = huge_pages(num_bytes)
    view, end = memoryview(pages), num_bytes
    while end:
        first = max(0, end - _PART_BYTES)
        os.preadv(descriptor, [view[first:end]], begin + first)
        os.ftruncate(descriptor, begin + first)
        end = first
    os.close(descriptor)
    return np.frombuffer(pages, np.uint8)


def _as_json(axis: Axis) -> object:
    return axis if isinstance(axis, int) else (axis.fixed, dict(axis.per))


def _axis(value: Any) -> Axis:
    return value if isinstance(value, int) else Size(value[0], **value[1])
