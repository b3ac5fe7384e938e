"""Messages between the engine and its worker processes: batches there, answers back.

Arrays are sent as their bytes, everything else as JSON. Nothing is pickled.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias

import numpy as np

from varlen.memory.memory_use import MemoryUse
from varlen.request.request import PAYLOADS, Float32Array, Prompt, RequestOptions

# Columns of the table of a batch, and the number that stands for nothing in it.
_COLUMNS = 5
_NONE = -1

Problem: TypeAlias = Literal["memory", "error", "skipped"]


@dataclass(frozen=True, slots=True)
class Answers:
    """What a worker returns for a batch.

    Attributes:
        rows: the answer of each sequence, in the order of the batch; empty after a problem.
        use: memory use of the worker.
        problem: reason why there are no answers: too little memory, an exception, or a step before that failed.
        trace: traceback of that exception, for the log.
    """

    rows: Sequence[Float32Array]
    use: MemoryUse
    problem: Problem | None = None
    trace: str = ""


def send_batch(
    connection: Connection, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
) -> None:
    """Send a batch to a worker."""
    connection.send_bytes(batch_message(prompts, options))


def batch_message(prompts: Sequence[Prompt], options: Sequence[RequestOptions]) -> bytes:
    """Return the message of a batch: one array of int32."""
    payloads = [prompt.payload for prompt in prompts]
    has_types = any(prompt.type_ids is not None for prompt in prompts)
    # [columns, sequences]
    table = [
        [len(prompt.token_ids) for prompt in prompts],
        [each.normalize for each in options],
        [PAYLOADS.index(type(payload)) for payload in payloads],
        [_NONE if payload.count is None else payload.count for payload in payloads],
        [_NONE if payload.tokens is None else len(payload.tokens) for payload in payloads],
    ]
    parts = [np.array([len(prompts), has_types], np.int32), np.array(table, np.int32).ravel()]
    parts += [prompt.token_ids for prompt in prompts]
    if has_types:
        parts += [np.zeros_like(p.token_ids) if p.type_ids is None else p.type_ids for p in prompts]
    parts += [payload.tokens for payload in payloads if payload.tokens is not None]
    return np.concatenate(parts).tobytes()


def receive_batch(connection: Connection) -> tuple[list[Prompt], list[RequestOptions]]:
    """Return the next batch.

    Raises:
        EOFError: the engine has closed the connection.
    """
    return batch_of(connection.recv_bytes())


def batch_of(message: bytes) -> tuple[list[Prompt], list[RequestOptions]]:
    """Return the batch of a message."""
    numbers = np.frombuffer(message, dtype=np.int32)
    count, has_types = numbers[:2].tolist()
    columns = numbers[2 : 2 + _COLUMNS * count].reshape(_COLUMNS, count).tolist()
    lengths, normalize, kinds, counts, sizes = columns
    held = [*lengths, *(lengths if has_types else []), *(max(size, 0) for size in sizes)]
    arrays = np.split(numbers[2 + _COLUMNS * count :], np.cumsum(held[:-1]))
    types = arrays[count : 2 * count] if has_types else [None] * count
    payloads = [
        PAYLOADS[kind](None if size == _NONE else tokens, None if number == _NONE else number)
        for kind, number, size, tokens in zip(kinds, counts, sizes, arrays[-count:], strict=True)
    ]
    prompts = list(map(Prompt, arrays[:count], types, payloads))
    return prompts, [RequestOptions(normalize=bool(each)) for each in normalize]


def send_answers(connection: Connection, answers: Answers) -> None:
    """Send the answers of a batch: a header, then all rows as one array."""
    header = {
        "use": answers.use.values(),
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
    return Answers(rows, MemoryUse(*header["use"]), header["problem"], header["trace"])
