"""Messages between the engine and its worker processes: batches there, answers back.

Arrays are sent as their bytes, everything else as JSON. Nothing is pickled.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias

import numpy as np

from varlen.execution.model_info import WorkerUse
from varlen.request import Float32Array, Int32Array, Prompt, RequestOptions

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
    use: WorkerUse
    problem: Problem | None = None
    trace: str = ""


def send_batch(
    connection: Connection, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
) -> None:
    """Send a batch to a worker; it goes as one array of int32."""
    has_types = any(prompt.type_ids is not None for prompt in prompts)
    header = [len(prompts), has_types]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    normalize = [each.normalize for each in options]
    masks = [prompt.num_masks for prompt in prompts]
    parts = [np.array([*header, *lengths, *normalize, *masks], dtype=np.int32)]
    parts += [prompt.token_ids for prompt in prompts]
    if has_types:
        parts += [np.zeros_like(p.token_ids) if p.type_ids is None else p.type_ids for p in prompts]
    parts += [p.mask_places for p in prompts if p.mask_places is not None]
    connection.send_bytes(np.concatenate(parts).data)


def receive_batch(connection: Connection) -> tuple[list[Prompt], list[RequestOptions]]:
    """Return the next batch.

    Raises:
        EOFError: the engine has closed the connection.
    """
    numbers = np.frombuffer(connection.recv_bytes(), dtype=np.int32)
    count, has_types = numbers[:2].tolist()
    lengths, normalize, masks, ids = np.split(numbers[2:], [count, 2 * count, 3 * count])
    tokens = sum(lengths.tolist())
    ids, types, places = np.split(ids, [tokens, (1 + has_types) * tokens])
    prompts = [
        Prompt(
            ids[begin:end],
            types[begin:end] if has_types else None,
            mask_places=places[first:last] if last > first else None,
        )
        for (begin, end), (first, last) in zip(_ranges(lengths), _ranges(masks), strict=True)
    ]
    return prompts, [RequestOptions(normalize=bool(each)) for each in normalize]


def _ranges(sizes: Int32Array) -> Iterator[tuple[int, int]]:
    """Return begin and end of adjacent parts of these sizes."""
    return pairwise(np.cumsum([0, *sizes]).tolist())


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
    return Answers(rows, WorkerUse(**header["use"]), header["problem"], header["trace"])
