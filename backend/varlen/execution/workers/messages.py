"""Messages between the processes of a model: JSON, and arrays as their bytes.

Nothing is pickled. A message on a control socket is JSON, perhaps with file descriptors. A message on a connection for
work is a batch, a step, or the answers to one: the length of the JSON, the JSON, then the arrays.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.memory.memory_use import MemoryUse, Swap
from varlen.request.request import PAYLOADS, Prompt, RequestOptions

if TYPE_CHECKING:
    from varlen.execution.packing import PackedStep

# Largest message on a control socket, in bytes; a socket of whole messages holds twice as much by default.
MAX_MESSAGE = 1 << 16
# File descriptors of a message at most.
MAX_DESCRIPTORS = 5
# Bytes of the length of the JSON; every array begins at a multiple of it.
_ALIGNMENT = 8
_PADDING = [b" " * count for count in range(_ALIGNMENT)]
# Data types by the character that a message has for them.
_DTYPES = {
    np.dtype(each).char: np.dtype(each) for each in (np.int32, np.int64, np.float32, np.float64)
}

Array: TypeAlias = npt.NDArray[Any]
Problem: TypeAlias = Literal["memory", "error", "skipped", "adapter"]


def send_control(
    control: socket.socket, message: Mapping[str, object], descriptors: Sequence[int] = ()
) -> None:
    """Send a message on a control socket, perhaps with file descriptors."""
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def receive_control(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message on a control socket, and its file descriptors.

    Raises:
        EOFError, OSError: the other process has ended.
    """
    data, descriptors, *_ = socket.recv_fds(control, MAX_MESSAGE, MAX_DESCRIPTORS)
    if not data:
        raise EOFError
    return json.loads(data), descriptors


def message_of(values: object, arrays: Iterable[Array]) -> bytes:
    """Return a message of values that JSON has, and of arrays."""
    forms, shapes, parts = "", [], []
    for array in arrays:
        forms += array.dtype.char
        shapes.append(array.shape)
        parts.append(array.data if array.flags.c_contiguous else array.tobytes())
        parts.append(_PADDING[-array.nbytes % _ALIGNMENT])
    header = json.dumps((values, forms, shapes)).encode()
    size = len(header).to_bytes(_ALIGNMENT, "little")
    return b"".join((size, header, _PADDING[-len(header) % _ALIGNMENT], *parts))


def content_of(message: bytes) -> tuple[Any, list[Array]]:
    """Return the values and the arrays of a message; the arrays may be written to."""
    # a copy that may be written to, as torch asks
    content = bytearray(message)
    end = _ALIGNMENT + int.from_bytes(content[:_ALIGNMENT], "little")
    values, forms, shapes = json.loads(content[_ALIGNMENT:end])
    arrays = []
    for form, shape in zip(forms, shapes, strict=True):
        end += -end % _ALIGNMENT
        array: Array = np.ndarray(shape, _DTYPES[form], content, end)
        end += array.nbytes
        arrays.append(array)
    return values, arrays


def batch_message(prompts: Sequence[Prompt], options: Sequence[RequestOptions]) -> bytes:
    """Return the message of a batch."""
    rows, arrays = [], []
    for prompt, each in zip(prompts, options, strict=True):
        payload = prompt.payload
        found = prompt.token_ids, prompt.type_ids, payload.tokens
        has = [array is not None for array in found]
        kind = PAYLOADS.index(type(payload))
        rows.append((each.normalize, each.outputs, each.adapter, kind, payload.count, has))
        arrays += [array for array in found if array is not None]
    return message_of(rows, arrays)


def batch_of(message: bytes) -> tuple[list[Prompt], list[RequestOptions]]:
    """Return the batch of a message."""
    rows, found = content_of(message)
    arrays, prompts = iter(found), []
    for *_, kind, count, has in rows:
        token_ids, type_ids, tokens = (next(arrays) if is_there else None for is_there in has)
        assert token_ids is not None
        prompts.append(Prompt(token_ids, type_ids, PAYLOADS[kind](tokens, count)))
    options = [
        RequestOptions(normalize=normalize, outputs=tuple(outputs), adapter=adapter)
        for normalize, outputs, adapter, *_ in rows
    ]
    return prompts, options


def step_message(step: PackedStep | None) -> bytes:
    """Return the message of a step; None asks the worker to check its device."""
    if step is None:
        return b""
    names, arrays = [], []
    for group in _step_fields():
        value = getattr(step, group)
        if isinstance(value, np.ndarray):
            names.append(group)
            arrays.append(value)
        else:
            names += [f"{group}.{name}" for name in value]
            arrays += value.values()
    return message_of(" ".join(names), arrays)


def step_of(message: bytes) -> PackedStep | None:
    """Return the step of a message; None asks for a check of the device."""
    if not message:
        return None
    from varlen.execution.packing import PackedStep

    names, arrays = content_of(message)
    groups: dict[str, Any] = {group: {} for group in _step_fields()}
    for (group, name), array in zip(_split(names), arrays, strict=True):
        if name:
            groups[group][name] = array
        else:
            groups[group] = array
    return PackedStep(**groups)


@cache
def _step_fields() -> tuple[str, ...]:
    """Return the field names of a step; an engine of batches needs no torch."""
    from varlen.execution.packing import PackedStep

    return tuple(each.name for each in fields(PackedStep))


@lru_cache(256)
def _split(names: str) -> Sequence[tuple[str, str]]:
    """Return group and name of each array; the name of a lone array is empty."""
    pairs = (each.partition(".") for each in names.split())
    return [(group, name) for group, _, name in pairs]


@dataclass(frozen=True, slots=True)
class Answers:
    """What a worker returns for a batch or a step.

    Attributes:
        rows: the answer of each sequence, in the order of the batch, or what a step has chosen; empty after a problem.
        problem: reason why there are no answers: too little memory, an exception, a step before that failed, or an
            adapter that cannot be read.
        trace: traceback of that exception, for the log, or what is wrong with the adapter.
        swaps: adapters that the worker has exchanged since the last answers.
    """

    rows: Sequence[Array]
    use: MemoryUse
    problem: Problem | None = None
    trace: str = ""
    adapter: str = ""
    swaps: Sequence[Swap] = ()


def send_answers(connection: Connection, answers: Answers) -> None:
    """Send the answers to the work that was received last."""
    values = (
        answers.use.values(),
        answers.problem,
        answers.trace,
        answers.adapter,
        answers.swaps,
    )
    connection.send_bytes(message_of(values, answers.rows))


def receive_answers(connection: Connection) -> Answers:
    """Return the answers to the work that was sent first.

    Raises:
        EOFError, OSError: the worker has ended.
    """
    (use, *problem), rows = content_of(connection.recv_bytes())
    return Answers(rows, MemoryUse(*use), *problem)
