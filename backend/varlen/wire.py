"""The wire: tensor names and shapes, and what of a request they may hold.

Names follow exported Hugging Face models, so that existing clients fit. This file knows arrays and
JSON, not the server's classes.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from varlen.config import Task
from varlen.errors import RequestError
from varlen.intake import Intake
from varlen.request import Float32Array, Prompt, Request, RequestOptions
from varlen.tokenization import Text

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]

# Rows that one request may hold where config.pbtxt does not say.
DEFAULT_MAX_ROWS = 64

MAX_PRIORITY = 9

_PAIR_TASKS = frozenset({"classify", "rerank", "hidden", "token_classify"})
_OUTPUT_NAMES: dict[Task, str] = {
    "embed": "sentence_embedding",
    "hidden": "last_hidden_state",
    "classify": "logits",
    "rerank": "logits",
    "token_classify": "logits",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of config.pbtxt; `dims` leave out the leading rows."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False


def input_specs(task: Task) -> tuple[TensorSpec, ...]:
    """Return the inputs of a task; a request brings either text or token ids, so each is optional."""
    texts = ("text", "text_pair") if task in _PAIR_TASKS else ("text",)
    ids = ("input_ids", "attention_mask", "token_type_ids")
    return (
        *(TensorSpec(name, "TYPE_STRING", (1,), optional=True) for name in texts),
        *(TensorSpec(name, "TYPE_INT64", (-1,), optional=True) for name in ids),
    )


def output_specs(task: Task, hidden_size: int, num_labels: int) -> tuple[TensorSpec, ...]:
    """Return the outputs of a task for a model of these sizes."""
    width = hidden_size if task in ("embed", "hidden") else num_labels
    dims = (-1, width) if task in ("hidden", "token_classify") else (width,)
    return (TensorSpec(_OUTPUT_NAMES[task], "TYPE_FP32", dims),)


def read_request(
    tensors: Tensors,
    parameters: str,
    intake: Intake,
    *,
    normalize: bool,
    timeout_microseconds: int = 0,
) -> Request:
    """Return the checked request that these tensors and parameters make up; nothing of the tensors is kept.

    Args:
        tensors: by input name, each with a leading dimension of rows.
        parameters: of the request, a JSON object. Keys that are not ours are ignored: frontends add their own.
        intake: of the model.
        normalize: what holds when the request does not say.
        timeout_microseconds: the server's own parameter `timeout`, a second deadline; 0 is none. The sooner holds.

    Raises:
        RequestError: it cannot be served; the message says what came and what is allowed.
    """
    options = json.loads(parameters) if parameters else {}
    truncate = _flag(options, "truncate", default=False)
    normalize = _flag(options, "normalize", default=normalize)
    priority = _priority(options)
    deadline = _deadline_seconds(options, timeout_microseconds)
    if "text" in tensors:
        prompts = intake.texts(_texts(tensors), truncate=truncate)
    elif "input_ids" in tensors:
        prompts = _token_rows(tensors, intake)
    else:
        raise RequestError(
            f"the request has {', '.join(tensors) or 'no inputs'}; send text, or input_ids"
        )
    return Request(prompts, RequestOptions(normalize, priority, deadline))


def output_array(task: Task, rows: Sequence[Float32Array]) -> Float32Array:
    """Return the output tensor of a request, one row per sequence.

    Rows of different lengths are filled up with zeros to the longest, since a tensor of the server has one shape.

    Returns:
        A new array: `[rows, width]`, or `[rows, longest, width]` for tasks that answer every token.
    """
    if task not in ("hidden", "token_classify"):
        return np.stack(rows)
    longest = max(len(row) for row in rows)
    filled = np.zeros((len(rows), longest, rows[0].shape[1]), dtype=np.float32)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = row
    return filled


def output_name(task: Task) -> str:
    """Return the name of a task's output tensor."""
    return _OUTPUT_NAMES[task]


def _texts(tensors: Tensors) -> list[Text]:
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        if name in tensors:
            raise RequestError(f"the request has both text and {name}; send one or the other")
    texts = _strings("text", tensors["text"])
    if "text_pair" not in tensors:
        return list(texts)
    pairs = _strings("text_pair", tensors["text_pair"])
    _check_rows("text_pair", len(pairs), "text", len(texts))
    return list(zip(texts, pairs, strict=True))


def _strings(name: str, tensor: npt.NDArray[Any]) -> list[str]:
    if tensor.ndim != 2 or tensor.shape[1] != 1:
        raise RequestError(f"{name} has shape {list(tensor.shape)}; send [rows, 1]")
    texts = []
    for row, element in enumerate(tensor[:, 0]):
        try:
            texts.append(bytes(element).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(
                f"row {row}: {name} is not UTF-8 at byte {error.start}; send UTF-8"
            ) from None
    return texts


def _token_rows(tensors: Tensors, intake: Intake) -> tuple[Prompt, ...]:
    if "text_pair" in tensors:
        raise RequestError("the request has text_pair without text; send both")
    ids = _integers("input_ids", tensors["input_ids"])
    lengths = _lengths(tensors.get("attention_mask"), ids.shape)
    rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    if "token_type_ids" not in tensors:
        return intake.token_ids(rows)
    types = _integers("token_type_ids", tensors["token_type_ids"])
    _check_shape("token_type_ids", types.shape, ids.shape)
    return intake.token_ids(
        rows, [row[:length] for row, length in zip(types, lengths, strict=True)]
    )


def _lengths(mask: npt.NDArray[Any] | None, shape: tuple[int, ...]) -> list[int]:
    """Return the tokens of each row: all, or as many as its mask begins with ones."""
    if mask is None:
        return [shape[1]] * shape[0]
    mask = _integers("attention_mask", mask)
    _check_shape("attention_mask", mask.shape, shape)
    lengths = (mask == 1).sum(axis=1)
    expected = np.arange(shape[1]) < lengths[:, None]
    wrong = np.flatnonzero((mask != expected).any(axis=1))
    if wrong.size:
        raise RequestError(
            f"row {wrong[0]}: attention_mask is not ones followed by zeros; pad on the right, without holes"
        )
    return cast(list[int], lengths.tolist())


def _integers(name: str, tensor: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if tensor.ndim != 2:
        raise RequestError(f"{name} has shape {list(tensor.shape)}; send [rows, tokens]")
    return tensor.astype(np.int64, copy=False)


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise RequestError(f"{name} has shape {list(shape)}; input_ids has {list(expected)}")


def _check_rows(name: str, rows: int, other: str, expected: int) -> None:
    if rows != expected:
        raise RequestError(f"{name} has {rows} rows; {other} has {expected}")


def _flag(options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"the parameter {name} is {value!r}; send true or false")
    return value


def _priority(options: Mapping[str, Any]) -> int:
    value = options.get("request_priority", 0)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 0 <= value <= MAX_PRIORITY:
        raise RequestError(
            f"the parameter request_priority is {value!r}; send a whole number from 0 to {MAX_PRIORITY}"
        )
    return cast(int, value)


def _deadline_seconds(options: Mapping[str, Any], timeout_microseconds: int) -> float | None:
    """Return the sooner of the two deadlines that a request may have."""
    deadlines = [timeout_microseconds / 1e6] if timeout_microseconds else []
    if "deadline_ms" in options:
        deadlines.append(_positive("deadline_ms", options["deadline_ms"]) / 1e3)
    return min(deadlines, default=None)


def _positive(name: str, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # not math.isfinite, which cannot take every int
    if not is_number or not 0 < cast(float, value) <= sys.float_info.max:
        raise RequestError(f"the parameter {name} is {value!r}; send a positive number")
    return float(cast(float, value))
