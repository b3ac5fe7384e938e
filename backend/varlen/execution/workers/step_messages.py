"""Messages between the engine and a worker of a model that generates: one step each.

A message to the worker has the size of every array in a fixed order, then the arrays. Its answers are arrays, too.
Nothing is pickled.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.execution.packing import PackedStep
from varlen.request.request import Float32Array
from varlen.scheduling.device_plan import Chosen, ChosenBeams
from varlen_kernels.reference.beam_search import ADVANCE_COLUMNS, FOLLOW_COLUMNS
from varlen_kernels.reference.logit_edits import EDIT_COLUMNS

# Group, name and data type of every array. The larger type comes first, so that all arrays are aligned.
_LAYOUT = (
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
    ("copies", "", np.int32),
    ("follows", "", np.int32),
    ("edits", "rows", np.int32),
    ("edits", "penalties", np.float32),
    ("edits", "tokens", np.int32),
    ("edits", "counts", np.int32),
    ("edits", "biases", np.float32),
    ("draws", "temperature", np.float32),
    ("draws", "top_k", np.int32),
    ("draws", "top_p", np.float32),
    ("draws", "min_p", np.float32),
    ("beams", "searches", np.int32),
    ("beams", "places", np.int32),
    ("beams", "given", np.int32),
    ("searches", "searches", np.int32),
    ("searches", "places", np.int32),
    ("searches", "divisors", np.float32),
    ("searches", "ends", np.int32),
    ("searches", "rows", np.int32),
    ("searches", "banned_rows", np.int32),
    ("searches", "banned_tokens", np.int32),
    ("searches", "sizes", np.int32),
)
# Columns of arrays with two axes.
_COLUMNS = {
    ("edits", "rows"): EDIT_COLUMNS,
    ("edits", "penalties"): 3,
    ("beams", "searches"): FOLLOW_COLUMNS,
    ("beams", "given"): 2,
    ("searches", "searches"): ADVANCE_COLUMNS,
    ("searches", "divisors"): 2,
}
# Length of an array that is absent.
_ABSENT = -1


def step_message(step: PackedStep | None) -> bytes:
    """Return the message of a step; None asks the worker to check its device."""
    if step is None:
        return b""
    groups: Mapping[str, Mapping[str, npt.NDArray[Any]]] = {
        "copies": {"": step.copies},
        "order": {"": step.order},
        "follows": {"": np.ascontiguousarray(step.follows)},
        "sources": step.sources,
        "inputs": step.inputs,
        "edits": step.edits,
        "draws": step.draws,
        "beams": step.beams,
        "searches": step.searches,
    }
    found = [groups[group].get(name) for group, name, _ in _LAYOUT]
    lengths = [_ABSENT if array is None else array.size for array in found]
    arrays = [array.data for array in found if array is not None]
    assert len(arrays) == sum(map(len, groups.values()))
    return b"".join((np.array(lengths, np.int64).data, *arrays))


def receive_step(connection: Connection) -> PackedStep | None:
    """Return the next step; None asks for a check of the device.

    Raises:
        EOFError: the engine has closed the connection.
    """
    return step_of(connection.recv_bytes())


def step_of(message: bytes) -> PackedStep | None:
    """Return the step of a message; None asks for a check of the device."""
    if not message:
        return None
    # a copy that may be written to, as torch asks
    content = bytearray(message)
    lengths = np.frombuffer(content, np.int64, len(_LAYOUT))
    groups: defaultdict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
    offset = lengths.nbytes
    for (group, name, dtype), length in zip(_LAYOUT, lengths.tolist(), strict=True):
        if length == _ABSENT:
            continue
        array = np.frombuffer(content, dtype, length, offset)
        offset += array.nbytes
        columns = _COLUMNS.get((group, name))
        groups[group][name] = array if columns is None else array.reshape(-1, columns)
    return PackedStep(
        groups["copies"][""].reshape(-1, 2),
        groups["sources"],
        groups["inputs"],
        groups["order"][""],
        groups["follows"][""].reshape(2, -1),
        groups["edits"],
        groups["draws"],
        groups["beams"],
        groups["searches"],
    )


def answers_of(chosen: Chosen) -> list[Float32Array]:
    """Return the choices of a step as answers of a batch; numbers keep their bits."""
    arrays: list[npt.NDArray[Any]] = [np.array(chosen.token_ids, np.int32)]
    arrays += chosen.searches or ()
    return [each.view(np.float32) for each in arrays]


def chosen_of(answers: Sequence[Float32Array]) -> Chosen:
    """Return what `answers_of` has made answers of."""
    token_ids, *searches = answers
    tokens = token_ids.view(np.int32).tolist()
    if not searches:
        return Chosen(tokens)
    ends, beams, scores = searches
    return Chosen(tokens, ChosenBeams(ends.view(np.int32), beams.view(np.int32), scores))
