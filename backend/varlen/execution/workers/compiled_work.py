"""Batches of a model whose ops are all compiled, in a process without torch.

A file in memory, or a stored one, brings the table of calls, the plan of memory and the weights (`child`).
docs/decisions/0137-workers-without-torch.md has measurements, 0138-starts-without-torch.md the rules of `StoredModel`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import varlen_kernels
from varlen.costs.store import code_hash, cpu_name, digest_of
from varlen.execution.cpu.call_table import CallKind, CallTable, TableRunner
from varlen.execution.one_shot import OneShot
from varlen.execution.thread_executor import CoreShare
from varlen.execution.workers.messages import (
    STORED_PREFIX,
    Array,
    Work,
    batch_of,
    content_of,
    message_of,
)
from varlen.memory.memory_use import MemoryUse, Swap
from varlen.memory.planner import HOST_ALIGNMENT, Axis, Buffer, Size, Usage, huge_pages, new_shared
from varlen.request.request import DEFAULT_OPTIONS, SHORTEST_PROMPT, Prompt, RequestOptions
from varlen_kernels.cache_files import CacheFolder
from varlen_kernels.cpu.native.target_cpu import features_here, target_cpu
from varlen_kernels.machine_memory import memory_limit

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.execution.runner import Runner

_Batch: TypeAlias = tuple[Sequence[Prompt], Sequence[RequestOptions]]
# Weights beyond this stay where they are: torch is little beside them, and for a moment there are two copies.
_MOST_BYTES = 1 << 30
# Bytes that are read at once, from the end of the file, which is cut there.
_PART_BYTES = 8 << 20
# The file begins with the hash of a stored model, which is 0 in memory, and with the length of a message.
_HASH_BYTES, _LENGTH_BYTES = 32, 8
_MESSAGE = _HASH_BYTES + _LENGTH_BYTES
_PAGE = 4096
# Largest stored model, and all of a cache folder together: those that were used last stay.
_MOST_STORED, _MOST_TOTAL = _MOST_BYTES + (64 << 20), 4 << 30
# Files of a checkpoint with which its model is stored.
_MOST_FILES = 1000
# What variables begin with that decide torch's cores and instructions.
_VARIABLES = ("ATEN_", "MKL_", "OMP_")
_PACKAGE = Path(__file__).parents[2]
# Microseconds of all cores that a container may use.
_CORES = Path("/sys/fs/cgroup/cpu.max")

_log = logging.getLogger(__name__)


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


def write_model(runner: Runner, log_level: str, lines: Sequence[tuple[int, str]] = ()) -> int:
    """Return the descriptor of a file in memory that holds a compiled model.

    Args:
        lines: level and text of the lines that the load has logged.
    """
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
        "lines": lines,
        "facts": runner.facts(),
        "state": (state.task, state.unweighted),
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
    os.pwrite(descriptor, len(message).to_bytes(_LENGTH_BYTES, "little") + message, _HASH_BYTES)
    for first, num_bytes, place in parts:
        os.pwrite(descriptor, (ctypes.c_char * num_bytes).from_address(first), begin + place)
    return descriptor


class CompiledWork(Work[_Batch, _Batch]):
    """Batches of a model from such a file; it is its own `LoadedModel`.

    Attributes:
        log_level: the level that the settings have.
        lines: level and text of the lines that its load has logged.
    """

    is_forked = True
    read = staticmethod(batch_of)

    def __init__(self, content: mmap.mmap) -> None:
        """Use the content of a file.

        Raises:
            ImportError, RuntimeError: see `address_of`.
        """
        self.runner = self
        length = int.from_bytes(content[_HASH_BYTES:_MESSAGE], "little")
        values, arrays = content_of(content[_MESSAGE : _MESSAGE + length])
        rows, places, numbers, size_places, size_numbers, kind_of, indices, offsets = arrays
        self._content = np.frombuffer(content, np.uint8)
        rows.ravel()[indices] = self._content.ctypes.data + _begin_of_weights(length) + offsets
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
        self.lines: Sequence[tuple[int, str]] = values["lines"]
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
    return -(-(_MESSAGE + length) // _PAGE) * _PAGE


def read_content(descriptor: int, *, is_cut: bool = True) -> mmap.mmap:
    """Return the content of a file.

    Args:
        is_cut: whether the file is cut off as it is read, so that its memory is never there twice.
    """
    end = os.fstat(descriptor).st_size
    pages = huge_pages(end)
    view = memoryview(pages)
    while end:
        first = max(0, end - _PART_BYTES)
        os.preadv(descriptor, [view[first:end]], first)
        if is_cut:
            os.ftruncate(descriptor, first)
        end = first
    return pages


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The file of a compiled model in a cache folder.

    Its name has a hash of a checkpoint's folder and the settings. It begins with a hash of its name, its key and its
    content: a load replaces a file that is damaged, or that other files or versions have made. No problem is an error.

    Attributes:
        key: hash of what else decides the content.
    """

    path: Path
    key: str

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StoredModel | None:
        """Return the file of the model of a `Setup`; None if it has none."""
        if not fields["stored"]:
            return None
        try:
            return cls(Path(fields["stored"]), _key_of(Path(fields["folder"])))
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            _log.info("the compiled model is not stored: %s", error)
            return None

    def read(self) -> CompiledWork | None:
        """Return the work of the model, if it is there."""
        try:
            with CacheFolder(self.path.parent).reading(self.path.name) as descriptor:
                if os.fstat(descriptor).st_size > _MOST_STORED:
                    raise ValueError("it is too large")
                content = read_content(descriptor, is_cut=False)
                if content[:_HASH_BYTES] != self._hash(content):
                    raise ValueError(
                        "it is damaged, or the checkpoint, the code or the CPU is another"
                    )
                with suppress(OSError):
                    # a folder that cannot be written keeps the time of the load
                    os.utime(descriptor)
            return CompiledWork(content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ImportError, RuntimeError, MemoryError) as error:
            _log.info("the compiled model in the cache is not used, the model is loaded: %s", error)
            return None

    def write(self, descriptor: int) -> None:
        """Store a model that is in memory, and remove what was not used for longest."""
        folder, content = (
            CacheFolder(self.path.parent),
            mmap.mmap(descriptor, 0, prot=mmap.PROT_READ),
        )
        try:
            with folder.writing(self.path.name) as path, path.open("wb") as file:
                file.write(self._hash(content))
                file.write(memoryview(content)[_HASH_BYTES:])
            found = []
            for name in folder.names():
                if name.removeprefix(".").startswith(STORED_PREFIX):
                    status = (folder.path / name).lstat()
                    found.append((status.st_mtime_ns, status.st_size, name))
        except OSError as error:
            _log.warning("the compiled model is not stored, and each start loads it: %s", error)
            return
        total = sum(size for _, size, _ in found)
        for _, size, name in sorted(found):
            if total > _MOST_TOTAL:
                folder.remove(name)
                total -= size

    def _hash(self, content: mmap.mmap) -> bytes:
        found = hashlib.sha256(f"{self.path.name} {self.key}".encode())
        found.update(memoryview(content)[_HASH_BYTES:])
        return found.digest()


def _key_of(folder: Path) -> str:
    """Return a hash of what decides a compiled model beside its settings.

    Raises:
        OSError, ValueError, ImportError, RuntimeError: it cannot be said.
    """
    stamps = []
    names = (
        Path(where, name) for where, _, names in os.walk(folder, followlinks=True) for name in names
    )
    for path in islice(names, _MOST_FILES + 1):
        status = path.stat()
        # a copy may have the time of another file, but not when it was written, nor its place
        times = status.st_mtime_ns, status.st_ctime_ns
        stamps.append(f"{path} {status.st_size} {times} {status.st_ino}")
    if len(stamps) > _MOST_FILES:
        raise ValueError(f"the checkpoint has more than {_MOST_FILES} files")
    variables = [each for each in os.environ.items() if each[0].startswith(_VARIABLES)]
    cores = _CORES.read_text() if _CORES.exists() else ""
    return digest_of(
        {
            "files": str(sorted(stamps)),
            "code": code_hash([*map(Path, varlen_kernels.__path__), _PACKAGE]),
            "versions": str(
                [sys.version, *map(metadata.version, ("torch", "numpy", "safetensors"))]
            ),
            "cpu": f"{cpu_name()} {target_cpu().level} {sorted(features_here())}",
            "cores": f"{len(os.sched_getaffinity(0))} {cores} {sorted(variables)}",
            "memory": str(memory_limit()),
        }
    )


def _as_json(axis: Axis) -> object:
    return axis if isinstance(axis, int) else (axis.fixed, dict(axis.per))


def _axis(value: Any) -> Axis:
    return value if isinstance(value, int) else Size(value[0], **value[1])
