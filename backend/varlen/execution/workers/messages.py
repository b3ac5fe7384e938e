"""Messages between the processes of a model, and the work that they bring.

Messages are JSON, and arrays as their bytes; nothing is pickled. On a control socket they may bring file descriptors.
One on a connection for work is a batch, a step, or the answers to one: the length of the JSON, the JSON, the arrays.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from varlen.execution.executor import outcome_of
from varlen.execution.packing import PackedStep
from varlen.execution.thread_executor import CoreShare
from varlen.memory.memory_use import MemoryUse, Swap
from varlen.request.request import PAYLOADS, Bytes, Prompt, RequestOptions

CHILD = "varlen.execution.workers.child"
# Arguments of a process: another one leads it; it has no torch, before the descriptor of its model; its model may be
# stored, so that it needs none; it waits for its engine.
MEMBER, COMPILED, STORED, WAITING = "member", "compiled", "stored", "waiting"
# What the names of stored models begin with.
STORED_PREFIX = "compiled-"
# Largest message on a control socket, in bytes; a socket of whole messages holds twice as much by default.
MAX_MESSAGE = 1 << 16
# File descriptors of a message at most.
MAX_DESCRIPTORS = 5
# Bytes of the length of the JSON; every array begins at a multiple of it.
_ALIGNMENT = 8
_PADDING = [b" " * count for count in range(_ALIGNMENT)]
# Most arrays, and bytes of JSON, of headers that are kept.
_FEW_ARRAYS, _SHORT_HEADER = 4, 256
# Data types by the character that a message has for them.
_DTYPES = {
    np.dtype(each).char: np.dtype(each) for each in (np.int32, np.int64, np.float32, np.float64)
}

# Fields of a step.
_STEP_FIELDS = tuple(each.name for each in fields(PackedStep))

Array: TypeAlias = npt.NDArray[Any]
Problem: TypeAlias = Literal["memory", "error", "skipped", "adapter"]
_Order = TypeVar("_Order")
_Part = TypeVar("_Part")


def peer_of(control: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a socket."""
    pid, user, _ = struct.unpack(
        "3i", control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return pid, user


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
    """Return a message of values that JSON has, and of arrays.

    Beside few arrays the values are hashable.
    """
    forms, shapes, parts = "", [], []
    for array in arrays:
        forms += array.dtype.char
        shapes.append(array.shape)
        parts.append(array.data if array.flags.c_contiguous else array.tobytes())
        parts.append(_PADDING[-array.nbytes % _ALIGNMENT])
    new_header = _header if len(shapes) > _FEW_ARRAYS else _header_of_few
    return b"".join((new_header(values, forms, tuple(shapes)), *parts))


def _header(values: object, forms: str, shapes: tuple[tuple[int, ...], ...]) -> bytes:
    header = json.dumps((values, forms, shapes)).encode()
    size = len(header).to_bytes(_ALIGNMENT, "little")
    return b"".join((size, header, _PADDING[-len(header) % _ALIGNMENT]))


# Lone requests are alike; with cold caches JSON takes 0.1 ms.
_header_of_few, _read_short = lru_cache(256)(_header), lru_cache(256)(json.loads)


def content_of(message: bytes) -> tuple[Any, list[Array]]:
    """Return values and arrays of a message; only the arrays may be written to."""
    # a copy that may be written to, as torch asks
    content = bytearray(message)
    end = _ALIGNMENT + int.from_bytes(message[:_ALIGNMENT], "little")
    read = json.loads if end > _SHORT_HEADER else _read_short
    values, forms, shapes = read(message[_ALIGNMENT:end])
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
        has = tuple([array is not None for array in found])
        kind = PAYLOADS.index(type(payload))
        rows.append((each.normalize, each.outputs, each.adapter, kind, payload.count, has))
        arrays += [array for array in found if array is not None]
    return message_of(tuple(rows), arrays)


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
    for group in _STEP_FIELDS:
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
    names, arrays = content_of(message)
    groups: dict[str, Any] = {group: {} for group in _STEP_FIELDS}
    for (group, name), array in zip(_split(names), arrays, strict=True):
        if name:
            groups[group][name] = array
        else:
            groups[group] = array
    return PackedStep(**groups)


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
        problem: reason why there are no answers.
        trace: traceback of an exception, for the log, or what is wrong with an adapter.
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
    values = answers.problem, answers.trace, answers.adapter, tuple(answers.swaps)
    connection.send_bytes(message_of(values, [np.array(answers.use.values()), *answers.rows]))


def receive_answers(connection: Connection) -> Answers:
    """Return the answers to the work that was sent first.

    Raises:
        EOFError, OSError: the worker has ended.
    """
    problem, (use, *rows) = content_of(connection.recv_bytes())
    return Answers(rows, MemoryUse(*use.tolist()), *problem)


class LoadedModel(Protocol):
    """A model that a process has loaded, such as a `Runner`; see there."""

    def facts(self) -> dict[str, Any]:
        """Return what the engine knows of it, as a message has it: a `ModelInfo`."""

    def share_cores(self, share: CoreShare) -> None: ...

    def use(self) -> MemoryUse: ...

    def new_swaps(self) -> Sequence[Swap]: ...

    def release_arenas(self) -> None: ...


class Work(Protocol[_Order, _Part]):
    """The work of a process that has loaded a model, or a part of one.

    Attributes:
        runner: the model that runs it.
        is_forked: whether workers are forked from this process; if not, it is its own only worker.
    """

    runner: LoadedModel
    is_forked: bool

    def warm_up(self) -> None:
        """Run the first batch or steps, in all processes of the model."""

    def share(self, byte: Bytes) -> Sequence[int]:  # noqa: ARG002
        """Return file descriptors of memory that the engine maps: none, if all answers are sent.

        Args:
            byte: `[1]`, which the engine writes when a launch should end with the step that runs.
        """
        return ()

    def read(self, message: bytes, /) -> _Order:
        """Return the work of a message."""

    def prepare(self, order: _Order, /) -> _Part:
        """Return the part that ranks or stages run; other work may run meanwhile."""

    def run(self, order: _Order, part: Callable[[], _Part], /) -> Sequence[Array]:
        """Return the answers to some work.

        Args:
            part: returns the result of `prepare`.
        """


class Orders(Generic[_Order, _Part]):
    """Work that is read when it runs."""

    def __init__(
        self,
        connection: Connection,
        read: Callable[[bytes], _Order],
        prepare: Callable[[_Order], _Part],
    ) -> None:
        """Read from a connection to the engine.

        Args:
            read: returns the work of a message.
            prepare: returns the part of it that ranks or stages run.
        """
        self._connection = connection
        self._read = read
        self._prepare = prepare
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)

    def next(self, timeout: float | None) -> tuple[_Order, Callable[[], _Part]] | None:
        """Return the next work and a function that prepares it; None after the timeout.

        Args:
            timeout: seconds; None is no limit.

        Raises:
            EOFError, OSError: the engine has closed the connection.
        """
        if not self._arrivals.poll(None if timeout is None else 1000 * timeout):
            return None
        order = self._read(self._connection.recv_bytes())
        return order, partial(self._prepare, order)


class ReadAhead(Orders[_Order, _Part]):
    """Work that a thread reads and prepares as it arrives.

    Its function returns the result of `prepare`, or raises its error.
    """

    def __init__(
        self,
        connection: Connection,
        read: Callable[[bytes], _Order],
        prepare: Callable[[_Order], _Part],
    ) -> None:
        """Start to read, see `Orders`."""
        super().__init__(connection, read, prepare)
        self._arrived: SimpleQueue[tuple[_Order, Callable[[], _Part]] | BaseException] = (
            SimpleQueue()
        )
        Thread(target=self._loop, name="varlen-orders", daemon=True).start()

    def next(self, timeout: float | None) -> tuple[_Order, Callable[[], _Part]] | None:
        """Return the next work, see `Orders.next`."""
        try:
            arrived = self._arrived.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def _loop(self) -> None:
        try:
            while (found := super().next(None)) is not None:
                order, prepare = found
                self._arrived.put((order, outcome_of(prepare)))
        except BaseException as error:
            # also too little memory to read: the process must not wait for ever
            self._arrived.put(error)
