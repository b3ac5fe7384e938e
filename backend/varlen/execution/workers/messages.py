"""Messages between the engine and its worker processes: batches there, answers back.

Arrays are sent as their bytes, everything else as JSON. Nothing is pickled.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias, cast

import numpy as np

from varlen.memory.memory_use import MemoryUse
from varlen.request.request import Float32Array, Int32Array, Prompt, RequestOptions

# Columns of the table of a batch, and the number that stands for nothing in it.
_COLUMNS = 6
_NONE = -1

Problem: TypeAlias = Literal["memory", "error"]


@dataclass(frozen=True, slots=True)
class Answers:
    """What a worker returns for a batch.

    Attributes:
        rows: the answer of each sequence, in the order of the batch; empty after a problem.
        use: memory use of the worker.
        problem: why there are no answers: too little memory, or an exception.
        trace: traceback of that exception, for the log.
    """

    rows: Sequence[Float32Array]
    use: MemoryUse
    problem: Problem | None = None
    trace: str = ""


def send_batch(
    connection: Connection, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
) -> None:
    """Send a batch to a worker; it goes as one array of int32."""
    has_types = any(prompt.type_ids is not None for prompt in prompts)
    # [columns, sequences]
    table = [
        [len(prompt.token_ids) for prompt in prompts],
        [each.normalize for each in options],
        [_NONE if prompt.num_keys is None else prompt.num_keys for prompt in prompts],
        [prompt.num_unpooled for prompt in prompts],
        [_size(prompt.mask_places) for prompt in prompts],
        [_size(prompt.kept_places) for prompt in prompts],
    ]
    parts = [np.array([len(prompts), has_types], np.int32), np.array(table, np.int32).ravel()]
    parts += [prompt.token_ids for prompt in prompts]
    if has_types:
        parts += [np.zeros_like(p.token_ids) if p.type_ids is None else p.type_ids for p in prompts]
    parts += [p.mask_places for p in prompts if p.mask_places is not None]
    parts += [p.kept_places for p in prompts if p.kept_places is not None]
    connection.send_bytes(np.concatenate(parts).data)


def receive_batch(connection: Connection) -> tuple[list[Prompt], list[RequestOptions]]:
    """Return the next batch.

    Raises:
        EOFError: the engine has closed the connection.
    """
    numbers = np.frombuffer(connection.recv_bytes(), dtype=np.int32)
    count, has_types = numbers[:2].tolist()
    columns = numbers[2 : 2 + _COLUMNS * count].reshape(_COLUMNS, count).tolist()
    lengths, normalize, keys, unpooled, masks, kept = columns
    sizes = [*lengths, *(lengths if has_types else [_NONE] * count), *masks, *kept]
    arrays = _split(numbers[2 + _COLUMNS * count :], sizes)
    ids, types, mask_places, kept_places = (
        arrays[first : first + count] for first in range(0, len(arrays), count)
    )
    prompts = [
        Prompt(
            cast(Int32Array, ids[index]),
            types[index],
            mask_places=mask_places[index],
            num_keys=None if keys[index] == _NONE else keys[index],
            kept_places=kept_places[index],
            num_unpooled=unpooled[index],
        )
        for index in range(count)
    ]
    return prompts, [RequestOptions(normalize=bool(each)) for each in normalize]


def _size(array: Int32Array | None) -> int:
    return _NONE if array is None else len(array)


def _split(numbers: Int32Array, sizes: Sequence[int]) -> list[Int32Array | None]:
    """Return adjacent parts of these sizes, None where the size is _NONE."""
    bounds = np.cumsum([0, *(max(size, 0) for size in sizes)]).tolist()
    return [
        None if size == _NONE else numbers[begin:end]
        for size, (begin, end) in zip(sizes, pairwise(bounds), strict=True)
    ]


def send_answers(connection: Connection, answers: Answers) -> None:
    """Send the answers of a batch: a header, then all rows as one array."""
    header = {
        "use": asdict(answers.use),
        "problem": answers.problem,
        "trace": answers.trace,
        "shapes": [row.shape for row in answers.rows],
    }
    connection.send_bytes(json.dumps(header).encode())
    if answers.rows:
        connection.send_bytes(np.concatenate(answers.rows, axis=None).data)


def receive_answers(connection: Connection) -> Answers:
    """Return the answers of the batch that was sent last.

    Raises:
        EOFError, OSError: the worker has ended.
    """
    header = json.loads(connection.recv_bytes())
    rows: list[Float32Array] = []
    if header["shapes"]:
        # a copy that may be written to
        numbers = np.frombuffer(bytearray(connection.recv_bytes()), dtype=np.float32)
        shapes = header["shapes"]
        bounds = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
        parts = np.split(numbers, bounds[:-1])
        rows = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return Answers(rows, MemoryUse(**header["use"]), header["problem"], header["trace"])
