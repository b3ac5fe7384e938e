"""Messages from the engine to a worker of a model that generates: one step each.

A message has the length of every array in a fixed order, then the arrays. Nothing is pickled.
"""

from collections import defaultdict
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.execution.step_packing import PackedStep

# Group, name and data type of every array. The larger type comes first, so that all arrays are aligned.
_LAYOUT = (
    ("copies", "", np.int64),
    ("order", "", np.int64),
    ("draws", "uniform", np.float64),
    ("sources", "slots", np.int64),
    ("inputs", "slots", np.int64),
    ("sources", "token_ids", np.int32),
    ("sources", "position_ids", np.int32),
    ("sources", "cu_seqlens", np.int32),
    ("inputs", "token_ids", np.int32),
    ("inputs", "position_ids", np.int32),
    ("inputs", "cu_seqlens", np.int32),
    ("inputs", "context_lens", np.int32),
    ("inputs", "block_ids", np.int32),
    ("inputs", "cu_blocks", np.int32),
    ("inputs", "logit_rows", np.int32),
    ("inputs", "source_rows", np.int32),
    ("inputs", "source_lens", np.int32),
    ("inputs", "source_block_ids", np.int32),
    ("inputs", "cu_source_blocks", np.int32),
    ("follows", "", np.int32),
    ("draws", "temperature", np.float32),
    ("draws", "top_k", np.int32),
    ("draws", "top_p", np.float32),
    ("draws", "min_p", np.float32),
)
# Length of an array that is absent.
_ABSENT = -1


def step_message(step: PackedStep | None) -> bytes:
    """Return the message of a step; None asks the worker to check its device."""
    if step is None:
        return b""
    groups: Mapping[str, Mapping[str, npt.NDArray[Any]]] = {
        "copies": {"": step.copies.ravel()},
        "order": {"": step.order},
        "follows": {"": step.follows.ravel()},
        "sources": step.sources,
        "inputs": step.inputs,
        "draws": step.draws,
    }
    found = [groups[group].get(name) for group, name, _ in _LAYOUT]
    lengths = [_ABSENT if array is None else len(array) for array in found]
    arrays = [array.data for array in found if array is not None]
    assert len(arrays) == sum(map(len, groups.values()))
    return b"".join((np.array(lengths, np.int64).data, *arrays))


def receive_step(connection: Connection) -> PackedStep | None:
    """Return the next step; None asks for a check of the device.

    Raises:
        EOFError: the engine has closed the connection.
    """
    # a copy that may be written to, as torch asks
    content = bytearray(connection.recv_bytes())
    if not content:
        return None
    lengths = np.frombuffer(content, np.int64, len(_LAYOUT))
    groups: defaultdict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
    offset = lengths.nbytes
    for (group, name, dtype), length in zip(_LAYOUT, lengths.tolist(), strict=True):
        if length == _ABSENT:
            continue
        array = np.frombuffer(content, dtype, length, offset)
        offset += array.nbytes
        groups[group][name] = array
    return PackedStep(
        groups["copies"][""].reshape(-1, 2),
        groups["sources"],
        groups["inputs"],
        groups["order"][""],
        groups["follows"][""].reshape(2, -1),
        groups["draws"],
    )
