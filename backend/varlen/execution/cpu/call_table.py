"""Calls of compiled functions as a table, and programs that are nothing but one.

A row has the address of a function, its work, and the addresses of what it reads and writes. One call runs a stretch of
rows, on one core or several. A process that runs such a program needs neither torch nor the table of ops: nothing here
imports them. docs/decisions/0054-compiled-steps.md and 0137-workers-without-torch.md have measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from varlen.execution.packing import Arrays, Int64Array
from varlen.execution.thread_executor import CoreShare, LoneCores
from varlen.memory.planner import (
    HOST_ALIGNMENT,
    Buffer,
    Dims,
    HostPages,
    Layout,
    PlannedMemory,
    Shape,
    Size,
    shapes_at,
)
from varlen.request.request import Float32Array
from varlen_kernels.cpu.calls.run_calls import ALWAYS, loaded_address, parts_of, run_calls
from varlen_kernels.cpu.native.threads import FUNCTION, PARTS, UNITS
from varlen_kernels.functions import FUNCTIONS

# Rows and columns of a tensor: axes after the first count as one.
Extent: TypeAlias = tuple[int | Size, int]

# Numbers of units and parts that a table keeps.
_MOST_WORK = 1 << 14


@dataclass(frozen=True, slots=True)
class CallKind:
    """Calls whose work is the same in every batch.

    Attributes:
        function: name of their function.
        extents: extent of each tensor of a call.
    """

    function: str
    extents: tuple[Extent, ...]
    constants: tuple[float, ...]

    @property
    def sizes(self) -> list[Size]:
        """The numbers of rows that differ from batch to batch."""
        return [rows for rows, _ in self.extents if isinstance(rows, Size)]

    def work(self, dims: Dims, cores: int) -> tuple[int, int]:
        """Return the numbers of units and of parts of its work."""
        extents = [
            (rows.at(dims) if isinstance(rows, Size) else rows, columns)
            for rows, columns in self.extents
        ]
        units, multiplications = FUNCTIONS[self.function].work(extents, self.constants)
        return units, parts_of(units, multiplications, cores)


class CallTable:
    """The calls of a run. Not for two threads at once.

    Attributes:
        rows: `[calls, columns]`, without what differs from batch to batch.
        addresses: flat indices of addresses in it, and for each the number of its tensor.
        sizes: flat indices of numbers of rows in it, and for each the number of its size.
        kinds: kinds of calls, one of each.
    """

    def __init__(
        self,
        rows: Int64Array,
        addresses: Sequence[Int64Array],
        sizes: Sequence[Int64Array],
        kinds: Sequence[CallKind],
        kind_of: Int64Array,
    ) -> None:
        self.rows, self.addresses, self.sizes = rows, addresses, sizes
        self.kinds, self.kind_of = kinds, kind_of
        self._all_sizes = sizes_of(kinds)
        # the numbers of the sizes that the work of each kind may depend on
        self._sizes_of = [[*map(self._all_sizes.index, kind.sizes)] for kind in kinds]
        # units and parts of a kind that were found before, by its number, the cores and these sizes
        self._work: dict[tuple[int, ...], tuple[int, int]] = {}
        # sizes and work of the last run, by its cores and dimensions, which most steps share with the one before
        self._last: tuple[int, Dims] = 0, {}
        self._last_sizes = self._last_work = np.empty(0, np.int64)

    def filled(self, addresses: Sequence[int], dims: Dims, cores: int) -> Int64Array:
        """Return the rows of a run on this number of cores.

        Args:
            addresses: the address of each tensor.
        """
        if self._last != (cores, dims):
            (sizes,) = shapes_at([self._all_sizes], dims)
            work = [self._work_of(kind, sizes, dims, cores) for kind in range(len(self.kinds))]
            self._last_sizes = np.array(sizes, np.int64)[self.sizes[1]]
            self._last_work = np.array(work, np.int64).reshape(-1, 2)[self.kind_of]
            self._last = cores, dict(dims)
        # nothing overwrites it: a thread that comes late may read it
        rows = self.rows.copy()
        flat = rows.ravel()
        places, numbers = self.addresses
        flat[places] = np.array(addresses, np.int64)[numbers]
        flat[self.sizes[0]] = self._last_sizes
        rows[:, UNITS : PARTS + 1] = self._last_work
        return rows

    def _work_of(self, kind: int, sizes: Sequence[int], dims: Dims, cores: int) -> tuple[int, int]:
        key = (kind, cores, *(sizes[index] for index in self._sizes_of[kind]))
        found = self._work.get(key)
        if found is None:
            if len(self._work) >= _MOST_WORK:
                self._work.clear()
            found = self._work[key] = self.kinds[kind].work(dims, cores)
        return found


def sizes_of(kinds: Sequence[CallKind]) -> tuple[Size, ...]:
    """Return the sizes of all kinds, each once, as a table counts them."""
    return tuple(dict.fromkeys(size for kind in kinds for size in kind.sizes))


def run_rows(rows: Int64Array, cores: int, lone: LoneCores | None) -> None:
    """Run filled rows of a table; see `run_calls`.

    Args:
        lone: the cores that a lone batch may use, if `cores` is their number.
    """
    # between products of oneDNN there is often nothing to share
    used = cores if cores > 1 and rows[:, PARTS].max() > 1 else 1
    gained = run_calls(rows, used, ALWAYS if lone is None else lone.share.byte)
    if lone is not None and used > 1:
        lone.add_gain(gained)


class TableRunner:
    """Runs batches of whole sequences by one table of calls: a `ProgramRunner`.

    Not for two threads at once.
    """

    longest_first, runs_at_launch = False, True

    def __init__(
        self,
        table: CallTable,
        entries: Sequence[str],
        inputs: Sequence[str],
        output: Shape,
        row_dimension: str,
        buffers: Sequence[Buffer],
        largest: Dims,
    ) -> None:
        """Load the code of all calls.

        Args:
            table: its tensors are the inputs, the buffers, and the output.
            entries: name of the code of each call.
            output: shape of the output, fp32.
            row_dimension: see `Program.row_dimension`.
            largest: largest dimensions of a batch.

        Raises:
            ImportError, RuntimeError: see `address_of`.
        """
        table.rows[:, FUNCTION] = [*map(loaded_address, entries)]
        self._table, self._output = table, output
        self.input_names, self.row_dimension = [*inputs], row_dimension
        self.memory = PlannedMemory(Layout(buffers, HOST_ALIGNMENT), largest, self._new_pages)
        self._lone: LoneCores | None = None

    def share_cores(self, share: CoreShare, cores: int) -> None:
        """Use this number of cores while `share` says that a batch runs alone, else one."""
        self._lone = LoneCores(share, cores)

    def launch(self, arrays: Arrays, dims: Dims) -> Callable[[], Float32Array]:
        """Run a batch; return a function that returns its output."""
        plan = self.memory.plan(dims)
        (begin,) = self.memory.reserve([plan])
        begin += self._begin
        (shape,) = shapes_at([self._output], dims)
        output: Float32Array = np.empty(shape, np.float32)
        addresses = [
            *(arrays[name].ctypes.data for name in self.input_names),
            *(begin + offset for offset in plan.offsets),
            output.ctypes.data,
        ]
        cores = 1 if self._lone is None else self._lone.count
        run_rows(self._table.filled(addresses, dims, cores), cores, self._lone)
        return lambda: output

    def close(self) -> None:
        """No resources to release."""

    def _new_pages(self, capacity: int) -> HostPages:
        pages = HostPages(capacity)
        self._begin = pages.address
        return pages
